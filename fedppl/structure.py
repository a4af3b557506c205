"""Temporary: batched packing over gaussian's structures."""
import numpy as np
from fedppl.gaussian import Structure, full, diagonal, block, project, packed_size, zeros, pack_triangle, unpack_triangle
__all__ = ["Structure", "full", "diagonal", "block", "project", "packed_size", "zeros", "pack_precision", "unpack_precision"]


def pack_precision(precision, structure):
    if structure.blocks is None:
        return np.array(precision)
    return np.concatenate([pack_triangle(precision[..., np.array(b)[:, None], np.array(b)]) for b in structure.blocks], axis=-1)


def unpack_precision(vector, structure):
    if structure.blocks is None:
        return np.array(vector)
    m = structure.size
    matrix = np.zeros((*vector.shape[:-1], m, m)); start = 0
    for b in structure.blocks:
        stop = start + len(b) * (len(b) + 1) // 2
        matrix[..., np.array(b)[:, None], np.array(b)] = unpack_triangle(vector[..., start:stop])
        start = stop
    return matrix
