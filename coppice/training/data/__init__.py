"""What heads and targets learn from: corpora, packed ids, and answers recorded from a target."""
