"""Ways to carry a plan out between processes. What they have in common is the plan, and that bytes stay bytes."""
