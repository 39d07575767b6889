"""The prices by which costs are computed: electricity, and the watts and hire of devices."""

import math
from typing import Annotated, Final, NamedTuple

import msgspec
from msgspec import Meta

from devices.device_class import SINGLE, find_single_class

_WATTS_OF_KILOWATT: Final = 1000.0
_MILLION: Final = 1e6
_SECONDS_OF_HOUR: Final = 3600.0

Price = Annotated[float, Meta(ge=0, le=1e9)]
DeviceName = Annotated[str, Meta(min_length=1, max_length=128, pattern=r"^[a-z0-9][-a-z0-9.]*$")]


class DensityPrices(msgspec.Struct, frozen=True, kw_only=True, rename="camel", forbid_unknown_fields=True):
    """Prices in one currency. A device is named by its class without the number, or by its vendor."""

    currency: Annotated[str, Meta(min_length=1, max_length=8)] = "USD"
    per_kwh: Price | None = None
    """Price of a kilowatt hour; None: electricity is not counted."""
    watts: dict[DeviceName, Price] = {}
    """Watts of one device that works."""
    per_hour: dict[DeviceName, Price] = {}
    """Hire of one device for an hour."""


class DeviceCost(NamedTuple):
    """The cost of one device; None is unknown."""

    watts: float | None
    per_hour: float | None


def find_device_cost(prices: DensityPrices, device_class: str, vendor: str) -> DeviceCost:
    """Return the watts of one device, and its cost per hour: the hire, and electricity if it has a price.

    A price is looked up by the device class, then by the vendor; None: the administrator states neither.

    Args:
        prices: what the administrator states.
        device_class: class of a replica with any number of devices, such as nvidia-l4x2.
        vendor: its vendor.
    """
    # The class of a single device, such as nvidia-l4 for nvidia-l4x2, is the name in the tables of prices.
    single = name_priced_device(device_class)
    watts = prices.watts.get(single, prices.watts.get(vendor))
    hire_per_hour = prices.per_hour.get(single, prices.per_hour.get(vendor))

    # Without a price of electricity, the hire is all. In a cloud, where no watts are stated, it includes electricity.
    if prices.per_kwh is None or watts is None:
        return DeviceCost(watts, per_hour=hire_per_hour)
    electricity = watts / _WATTS_OF_KILOWATT * prices.per_kwh
    return DeviceCost(watts, per_hour=electricity + (hire_per_hour or 0.0))


def name_priced_device(device_class: str) -> str:
    """Return the name by which the prices of a device are stated: its class without the number."""
    return find_single_class(device_class).removesuffix(SINGLE)


def price_million_tokens(per_hour: float | None, tokens_per_second: float | None) -> float | None:
    """Return the price of a million tokens at this speed; None: a part is unknown."""
    if per_hour is None or not tokens_per_second:
        return None
    price = per_hour / (tokens_per_second * _SECONDS_OF_HOUR) * _MILLION
    return price if math.isfinite(price) else None
