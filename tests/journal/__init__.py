"""An independent judge of finished runs: it reads their files and shares no code with what made them."""
