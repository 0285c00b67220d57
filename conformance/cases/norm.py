"""RMSNorm and LayerNorm: inputs where epsilon decides, where the mean decides, and where one value decides."""

from conformance.cases.case import Case, Inputs, draw

D = 24


def _rms(x_scale: float = 1.0, eps: float = 1e-5) -> Inputs:
    return {"x": draw(1, 5, D, scale=x_scale), "weight": draw(2, D, scale=0.3, shift=1.0), "eps": eps}


def _spike() -> Inputs:
    made = _rms()
    made["x"][2, 7] = 30000.0
    return made


def _zeros() -> Inputs:
    made = _rms()
    made["x"][1] = 0.0
    return made


def _layer(shift: float = 0.0) -> Inputs:
    return {
        "x": draw(3, 5, D, shift=shift),
        "weight": draw(4, D, scale=0.3, shift=1.0),
        "bias": draw(5, D, scale=0.4),
        "eps": 1e-6,
    }


def _constant() -> Inputs:
    made = _layer()
    made["x"][3] = 2.5
    return made


CASES = (
    Case("rms", "ordinary", _rms),
    Case("rms", "mean square near epsilon", lambda: _rms(x_scale=1e-3, eps=1e-6)),
    Case("rms", "mean square far below epsilon", lambda: _rms(x_scale=1e-6, eps=1e-2)),
    Case("rms", "one value outweighs the others", _spike),
    Case("rms", "a row of zeros", _zeros),
    Case("layer", "ordinary", _layer),
    Case("layer", "mean far above the deviation", lambda: _layer(shift=64.0)),
    Case("layer", "a constant row gives the bias", _constant),
)
