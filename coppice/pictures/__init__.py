"""What the pictures of every command share."""
