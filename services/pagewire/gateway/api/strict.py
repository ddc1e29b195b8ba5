"""The base of all request models."""

from typing import ClassVar

from pydantic import BaseModel, ConfigDict

from pagewire.gateway.api.unsupported import Neutral


class Strict(BaseModel):
    """A JSON object without type conversions: "5" is not a number, true is not an integer.

    NaN and infinity are refused. Extra fields are kept, so that `check_extras` can tell unknown
    fields from hints and from refused ones; `unsupported.py` explains the two tables.
    """

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)

    hints: ClassVar[frozenset[str]] = frozenset()
    refused: ClassVar[Neutral] = {}
