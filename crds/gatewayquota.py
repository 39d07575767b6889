"""`GatewayQuota`: how much all keys of one namespace together may ask of the gateway; an administrator writes it."""

from typing import Annotated

from crds.gatewaykey import Limit
from crds.meta import ApiObject, ApiStruct, rule


class GatewayQuotaSpec(ApiStruct, frozen=True):
    """The limits of all GatewayKeys of a namespace together."""

    requests_per_minute: Annotated[Limit | None, "The most requests in a minute. Default: no limit."] = None
    tokens_per_minute: Annotated[
        Limit | None, "The most tokens of prompts and answers together in a minute. Default: no limit."
    ] = None
    concurrent_requests: Annotated[Limit | None, "The most requests at once. Default: no limit."] = None


class GatewayQuota(ApiObject, frozen=True, kw_only=True):
    """The most that all GatewayKeys of the namespace of this name together may ask of the gateway."""

    spec: Annotated[GatewayQuotaSpec, "The limits of all GatewayKeys of the namespace together."] = GatewayQuotaSpec()


NAME_RULE = rule(
    "!self.metadata.name.contains('.') && size(self.metadata.name) <= 63",
    "a GatewayQuota has the name of the namespace whose GatewayKeys it limits: at most 63 letters, digits and '-'",
)
