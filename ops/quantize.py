"""Matrices as 8-bit floats (e4m3) with a power-of-two scale for each block of 128 x 128.

    weight, scale = quantized(matrix_RC)             # float8_e4m3fn [R, C], float32 [R / 128, C / 128], rounded up
    matrix_RC = dequantized(weight, scale)

The form is that of DeepSeek-V3 (DeepSeek-AI, DeepSeek-V3 Technical Report, 2024, section 3.3), as vLLM loads it: an
element is its 8-bit float times the scale of its block. Scales are powers of two: multiplying by them is exact, and
8-bit floats round relative to their size, so the error is about that of other scales. On Hopper, vLLM lets DeepGEMM
compute with such scales only, and quantizes weights that have others again (`requant_weight_ue8m0_inplace`). `scales`
chooses such that this changes no bit.

A slice of a matrix gives the blocks of the whole matrix: `at` is its first row and column there, and the largest
elements of a block that several slices share are combined before `scales`.

Legend: R rows, C columns of a matrix or slice; leading dimensions, such as experts, are kept. I, J blocks that it
touches.
"""

from __future__ import annotations

import torch
from torch.nn.functional import pad

BLOCK = 128  # rows and columns
DTYPE = torch.float8_e4m3fn
LARGEST = 448.0  # of e4m3
LEAST = 1e-4  # a block whose elements are smaller is scaled as if its largest were this, as DeepGEMM does
_CHUNK = 1 << 25  # elements that are converted at once: float32 copies stay small
_FITS = (464 - 256) << 15  # 464's mantissa: up to there, halfway to where 480 would be, a number rounds to 448


def blocks(size: int) -> int:
    """Return the number of blocks along a dimension."""
    return -(-size // BLOCK)


@torch.no_grad()
def largest(matrix_RC: torch.Tensor, at: tuple[int, int] = (0, 0)) -> torch.Tensor:
    """Return the largest size of an element in each block [..., I, J], float32. Infinite if one is not a number."""
    parts = []
    for part_RC in _chunks(matrix_RC):
        tiled = _tiled(part_RC, at)
        parts.append(torch.maximum(tiled.amax((-3, -1)), -tiled.amin((-3, -1))).float())
    return torch.cat(parts).view(*matrix_RC.shape[:-2], *parts[0].shape[-2:]).nan_to_num(torch.inf, posinf=torch.inf)


def scales(largest_IJ: torch.Tensor) -> torch.Tensor:
    """Return the scale of each block: the smallest power of two with which its largest element rounds to at most 448.
    Infinite for a block with an element that is not finite: all of it is then not a number."""
    bits = largest_IJ.clamp(min=LEAST).contiguous().view(torch.int32)
    exponent = (bits >> 23) - 8 + ((bits & 0x7FFFFF) > _FITS)
    scale_IJ = (exponent << 23).view(torch.float32)  # no library's power of two, which may be off by a bit
    return torch.where(largest_IJ.isfinite(), scale_IJ, torch.inf)


@torch.no_grad()
def quantize(
    matrix_RC: torch.Tensor, scale_IJ: torch.Tensor, out_RC: torch.Tensor, at: tuple[int, int] = (0, 0)
) -> torch.Tensor:
    """Write the 8-bit floats of a matrix or slice into `out_RC`, of the same shape. Returns two float64 sums: the
    squares of the errors, and of the elements."""
    sums = torch.zeros(2, dtype=torch.float64, device=matrix_RC.device)
    scale_IJ = scale_IJ.reshape(-1, *scale_IJ.shape[-2:])
    first = 0
    for part_RC, part_out in zip(_chunks(matrix_RC), _chunks(out_RC)):
        spread = scale_IJ[first : first + len(part_RC), :, None, :, None]
        first += len(part_RC)
        exact = _tiled(part_RC, at).float()
        rounded = (exact / spread).clamp_(-LARGEST, LARGEST).to(DTYPE)
        part_out.copy_(_untiled(rounded, at)[:, : part_RC.shape[-2], : part_RC.shape[-1]])
        error = rounded.float().mul_(spread).sub_(exact)
        sums += torch.stack([each.square().sum(-1).sum(dtype=torch.float64) for each in (error, exact)])
    return sums


def quantized(matrix_RC: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a whole matrix as 8-bit floats, and its scales."""
    scale_IJ = scales(largest(matrix_RC))
    weight_RC = torch.empty(matrix_RC.shape, dtype=DTYPE, device=matrix_RC.device)
    quantize(matrix_RC, scale_IJ, weight_RC)
    return weight_RC, scale_IJ


def dequantized(weight_RC: torch.Tensor, scale_IJ: torch.Tensor, at: tuple[int, int] = (0, 0)) -> torch.Tensor:
    """Return the float32 matrix or slice that the 8-bit floats stand for."""
    return weight_RC.float() * _spread(scale_IJ, weight_RC.shape[-2:], at)


def relative_error(sums: torch.Tensor) -> float:
    """Return the Frobenius norm of the error over that of the matrix, from the sums of `quantize`; 0 for a matrix of
    zeros."""
    error, size = sums.tolist()
    return float((error / size) ** 0.5) if size else 0.0


def _chunks(matrix_RC: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Split [..., R, C] into views [X, R, C] of a bounded number of elements, or of one matrix."""
    flat = matrix_RC.view(-1, *matrix_RC.shape[-2:])
    return flat.split(max(1, _CHUNK // max(1, flat[0].numel())))


def _tiled(matrix_XRC: torch.Tensor, at: tuple[int, int]) -> torch.Tensor:
    """View as blocks [X, I, 128, J, 128], with zeros around a slice that cuts blocks."""
    (rows, columns), (before, left) = matrix_XRC.shape[-2:], (start % BLOCK for start in at)
    down, across = blocks(before + rows), blocks(left + columns)
    after, right = down * BLOCK - before - rows, across * BLOCK - left - columns
    if before or left or after or right:
        matrix_XRC = pad(matrix_XRC, (left, right, before, after))
    return matrix_XRC.reshape(-1, down, BLOCK, across, BLOCK)


def _untiled(tiled: torch.Tensor, at: tuple[int, int]) -> torch.Tensor:
    """View blocks as matrices that begin with the slice's first element."""
    matrix_XRC = tiled.reshape(len(tiled), tiled.shape[1] * BLOCK, tiled.shape[3] * BLOCK)
    return matrix_XRC[:, at[0] % BLOCK :, at[1] % BLOCK :]


def _spread(scale_IJ: torch.Tensor, shape: torch.Size, at: tuple[int, int]) -> torch.Tensor:
    """Return the scale of each element of a slice."""
    rows, columns = (
        torch.arange(start % BLOCK, start % BLOCK + extent, device=scale_IJ.device) // BLOCK
        for start, extent in zip(at, shape)
    )
    return scale_IJ[..., rows[:, None], columns]
