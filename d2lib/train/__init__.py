"""Training: recipes, objectives, schedules, the loop and its immutable checkpoints."""
