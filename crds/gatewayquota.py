"""`GatewayQuota`: how much all keys of one namespace together may ask of the gateway; an administrator writes it."""

from typing import Annotated

from crds.gatewaykey import ConcurrentRequests, RequestsPerMinute, TokensPerMinute
from crds.meta import ApiObject, ApiStruct, rule


class GatewayQuotaSpec(ApiStruct, frozen=True):
    """The limits of all GatewayKeys of a namespace together."""

    requests_per_minute: RequestsPerMinute = None
    tokens_per_minute: TokensPerMinute = None
    concurrent_requests: ConcurrentRequests = None


class GatewayQuota(ApiObject, frozen=True, kw_only=True):
    """The most that all GatewayKeys of the namespace of this name together may ask of the gateway."""

    spec: Annotated[GatewayQuotaSpec, "The limits of all GatewayKeys of the namespace together."] = GatewayQuotaSpec()


NAME_RULE = rule(
    "!self.metadata.name.contains('.') && size(self.metadata.name) <= 63",
    "a GatewayQuota has the name of the namespace whose GatewayKeys it limits: at most 63 letters, digits and '-'",
)
