"""Prompts: those that come with Coppice, and files of them."""
