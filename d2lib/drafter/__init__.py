"""The drafter: configuration, reference arithmetic (REF), the fast training path (FAST), LoRA, weights."""
