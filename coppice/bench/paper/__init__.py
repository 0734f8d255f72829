"""The papers' tables: what each part of a head is worth, by training and by replaying drafts."""
