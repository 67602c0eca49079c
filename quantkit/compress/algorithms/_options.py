"""Types of step options. quantkit refuses a recipe with a value outside the allowed range; see `recipe.steps`."""

from typing import Annotated

from pydantic import Field

Positive = Annotated[int, Field(gt=0)]
NotNegative = Annotated[int, Field(ge=0)]
Share = Annotated[float, Field(ge=0, le=1)]
PositiveShare = Annotated[float, Field(gt=0, le=1)]
