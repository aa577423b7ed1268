"""The lab: what only the self-made profiles need (target LMs, capture, the live decode loop)."""
