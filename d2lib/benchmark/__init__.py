"""Speed and memory of the parts that this project exists for, as ratios of two sides in one run."""
