"""stub until merged"""

from typing import Any
import numpy as np


class SquareSum:
    def __init__(self, v):
        self.v = v

    @classmethod
    def of(cls, ts):
        import math

        return cls(sum(float(t.double().square().sum()) for t in ts))

    def numbers(self):
        return np.array([self.v]).view(np.int64)

    @classmethod
    def total(cls, rows):
        return cls(float(rows.view(np.float64).sum()))

    def norm(self):
        return self.v**0.5
def global_norm(gs):
    import math
    return math.sqrt(sum(float(g.double().square().sum()) for g in gs))
