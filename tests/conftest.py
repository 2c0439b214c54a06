"""One thread a process: the suite runs side by side."""

import torch

torch.set_num_threads(1)
