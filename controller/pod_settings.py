"""Settings of the administrator that concern pods: those of Jobs, and those that serve."""

from collections.abc import Mapping
from typing import Final

import msgspec

from controller.tenant_limits import UNLIMITED, TenantLimits
from devices.vendors import VENDORS, Vendors


class PodSettings(msgspec.Struct, frozen=True):
    """Options of the controller that reach pods."""

    image: str = ""
    """Image with `pomona` as its entry point."""
    environment: Mapping[str, str] = {}
    """Variables of the Jobs."""
    limits: TenantLimits = UNLIMITED
    vendors: Vendors = VENDORS


DEFAULT_SETTINGS: Final = PodSettings()
