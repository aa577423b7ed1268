"""The drafter of DeepSeek-V4 and V4.1: stages of multi-query attention and experts over hyper-connected streams."""
