"""`coppice bench run`: methods side by side on questions, with their speed, agreement and checks."""
