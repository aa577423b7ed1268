"""One thread for everything: small tensors on busy cores take seconds on two."""

from __future__ import annotations

import torch

torch.set_num_threads(1)
