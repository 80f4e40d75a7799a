"""Put a model and a loss that is a module of its own under one module.

``(model, loss_fn) --> one module that owns the tensors of both``: the model's under the model's own names,
the loss's under ``loss_fn.``. The loss's parameters are trained and its buffers follow, like the model's.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

from torch import Tensor, nn

from zbcompile.errors import UsageError
from zbcompile.passes.torch_private import module_tables

__all__ = ["loss_module", "loss_name", "result_with_loss", "with_loss"]

LOSS = "loss_fn"


def loss_module(model: nn.Module, loss_fn: object) -> nn.Module | None:
    """Return ``loss_fn`` if it is a module outside ``model``, else None."""
    if not isinstance(loss_fn, nn.Module) or any(loss_fn is module for module in model.modules()):
        return None
    return loss_fn


def with_loss(model: nn.Module, loss_fn: object) -> nn.Module:
    """Return the module whose tensors a pipeline trains: ``model`` itself where the loss has none."""
    loss = loss_module(model, loss_fn)
    if loss is None or not [*loss.parameters(), *loss.buffers()]:
        return model
    return WithLoss(model, loss)


def loss_name(whole: nn.Module) -> str:
    """Return the name that the loss has among the children of `with_loss`'s module."""
    return whole.loss_name if isinstance(whole, WithLoss) else LOSS


def result_with_loss(loss: object, output: object) -> dict[str, object]:
    """Return what stages with a loss function return: loss, output, and metrics if the function gives any.

    Parameters
    ----------
    loss
        What the function returned: the loss, or (loss, metrics) with a dict of tensors.
    output
        What the model returned.

    Raises
    ------
    UsageError
        A metric is no tensor.
    """
    if not (isinstance(loss, tuple) and len(loss) == 2 and isinstance(loss[1], Mapping)):
        return {"loss": loss, "output": output}
    metrics = {str(name): value for name, value in loss[1].items()}
    for name, value in metrics.items():
        if not isinstance(value, Tensor):
            raise UsageError(
                "a metric is no tensor",
                where=f"loss_fn, metric {name!r}",
                given=type(value).__name__,
                fix="return tensors; what does not depend on the batch need not go through the pipeline",
            )
    return {"loss": loss[0], "metrics": metrics, "output": output}


class WithLoss(nn.Module):
    """The model's own tables of tensors and children, and the loss as one more child. It is not called.

    It holds no tensor: a tensor that is replaced in the model, here or there, is replaced on both sides.

    Attributes
    ----------
    loss_name
        Name of the loss among the children.
    """

    def __init__(self, model: nn.Module, loss: nn.Module) -> None:
        name = LOSS
        children, _, _ = module_tables(model)
        while name in children:
            name += "_"
        self.__dict__.update(model.__dict__)
        self.__dict__["_modules"] = {**children, name: loss}
        self.__dict__["_model"] = (model,)
        self.__dict__["loss_name"] = name

    loss_name: str

    @property
    def training(self) -> bool:  # type: ignore[override]
        """The model's own mode."""
        (model,) = cast("tuple[nn.Module]", self.__dict__["_model"])
        return model.training
