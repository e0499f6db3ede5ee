"""An independent checker of finished runs: it reads their files and shares no code with the engine that wrote them."""
