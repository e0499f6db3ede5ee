"""What the user writes, and what a stage is given. Plain descriptions; nothing runs here."""
