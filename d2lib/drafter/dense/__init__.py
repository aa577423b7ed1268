"""Dense drafters: DSpark and DFlash with Qwen3-style blocks over a target's hidden states."""
