"""With the controller's token, what a host has is taken over for a host of the same name only."""

import pytest

from crds.meta import HOSTS_NAMESPACE
from kube.errors import Forbidden
from kube.resources import METAL_HOSTS, SECRETS
from tests.cluster.policy.test_stolen_controller_token import MANAGER, Thief, thief

__all__ = ["thief"]

OTHER = "policy-2"


async def test_objects_of_another_host_are_not_taken_over(thief: Thief) -> None:
    own, other = thief.owners["MetalHost"], {"metadata": {"name": OTHER}, "spec": {}}
    thief.owners["MetalHost"] = await thief.admin.create(METAL_HOSTS, other)
    copy = thief.owned("MetalHost", SECRETS, OTHER, type="Opaque", data={"team_chat-token_token": "Zm9v"})
    try:
        await thief.admin.apply(*copy, field_manager=MANAGER)
        thief.owners["MetalHost"] = own
        taken = thief.owned("MetalHost", SECRETS, OTHER, type="Opaque", data={})
        with pytest.raises(Forbidden, match=f"secrets {HOSTS_NAMESPACE}/{OTHER} belongs to another MetalHost"):
            await thief.api.apply(*taken, field_manager=MANAGER)
        kept = await thief.admin.get(SECRETS, OTHER, HOSTS_NAMESPACE)
        assert kept["data"] == {"team_chat-token_token": "Zm9v"}
    finally:
        await thief.admin.delete(SECRETS, OTHER, HOSTS_NAMESPACE)
        await thief.admin.delete(METAL_HOSTS, OTHER)
