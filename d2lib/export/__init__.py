"""A judged adapter, as files that other stacks read."""
