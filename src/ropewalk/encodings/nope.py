"""No position encoding (Kazemnejad et al. 2023, arXiv:2305.19466v2): causality alone tells order."""

from ropewalk.encodings.base import Encoding


class NoPE(Encoding):
    """score(i, j) unchanged."""

    relative = True
