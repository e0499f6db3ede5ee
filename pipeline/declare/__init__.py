"""What the user writes, and what a stage receives. Plain descriptions; nothing runs here."""
