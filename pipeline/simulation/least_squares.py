"""Non-negative least squares in two or three unknowns, without numpy.

non_negative([((1.0, 512.0), 0.61), ((1.0, 128.0), 0.23)])    # coefficients, and the squared relative error
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations

Row = tuple[tuple[float, ...], float]  # the known values of a measurement, and the measurement, above 0


def non_negative(rows: Sequence[Row]) -> tuple[tuple[float, ...], float]:
    """Return the non-negative coefficients with the least squared relative error, and that error.

    With so few unknowns, every subset of columns can be tried; the best subset whose solution has no negative
    coefficient is the answer. If several single columns fit equally well (all measurements have one size), the last one
    wins, so the result is proportional to the size rather than fixed.
    """
    width = len(rows[0][0])
    best, least = (0.0,) * width, float(len(rows))
    for size in range(1, width + 1):
        for chosen in combinations(range(width), size):
            found = _solved(rows, chosen)
            if found is None or min(found) < 0:
                continue
            values = dict(zip(chosen, found))
            coefficients = tuple(values.get(i, 0.0) for i in range(width))
            error = sum((sum(c * x for c, x in zip(coefficients, xs)) / y - 1) ** 2 for xs, y in rows if y > 0)
            if error < least * (1 - 1e-9) or (size == 1 and error <= least * (1 + 1e-9)):
                best, least = coefficients, error
    return best, least


def _solved(rows: Sequence[Row], chosen: Sequence[int]) -> list[float] | None:
    """Solve the normal equations of some columns by Gaussian elimination; None if they are singular."""
    columns = [[xs[i] / y for xs, y in rows if y > 0] for i in chosen]
    norms = [sum(x * x for x in column) ** 0.5 for column in columns]
    if not all(norms):
        return None
    columns = [[x / norm for x in column] for column, norm in zip(columns, norms)]
    size = len(chosen)
    matrix = [[sum(x * y for x, y in zip(a, b)) for b in columns] + [sum(a)] for a in columns]
    for a in range(size):
        pivot = max(range(a, size), key=lambda i: abs(matrix[i][a]))
        matrix[a], matrix[pivot] = matrix[pivot], matrix[a]
        if abs(matrix[a][a]) < 1e-9:  # the columns have unit length, so they are parallel
            return None
        for b in range(size):
            if b != a:
                factor = matrix[b][a] / matrix[a][a]
                matrix[b] = [x - factor * y for x, y in zip(matrix[b], matrix[a])]
    return [matrix[a][size] / matrix[a][a] / norms[a] for a in range(size)]
