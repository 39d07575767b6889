"""The weights of a Model for pods: the volumes that its owner wants, and those that hold verified weights."""

from typing import Annotated, Literal

from msgspec import Meta

from crds.meta import Amount, ApiStruct, LongText, Name, Quantity, ShortText, Time, Uid, checked_by, rule

Sha256 = Annotated[str, Meta(max_length=128, pattern=r"^([0-9a-f]{64})?$")]
"""A digest, which names a folder on hosts: 64 lower-case hexadecimal digits; empty if it is not known."""


class CacheOptions(ApiStruct, frozen=True):
    """The volume that holds the verified weights for pods."""

    medium: Annotated[
        Literal["Volume", "Image"],
        "How pods get the weights. Volume: a Job downloads them to a PersistentVolumeClaim. Image: each node pulls "
        "the container image of an oci:// source by its digest and mounts it, without a Job and a volume; this "
        "needs nodes with Kubernetes 1.35 or later and a container runtime that mounts images. containerd 2.1 "
        "mounts container images; CRI-O 1.33 also mounts artifacts of files, such as `oras push` makes. Nodes pull "
        "from a private registry with the imagePullSecrets of the service, and from one without TLS if their "
        "runtime is configured for it.",
        checked_by(rule("self == oldSelf", "cache.medium cannot change: make a new Model")),
    ] = "Volume"
    scope: Annotated[
        Literal["model", "node"],
        "What a volume is for. model: one volume for all pods. node: a volume for each node that serves the Model, "
        "so that pods read from the disk of their node. It needs a storageClassName with volumeBindingMode "
        "WaitForFirstConsumer, such as one of local volumes. The scheduler chooses the node: the Job that fetches "
        "asks for what a replica asks for. A copy stays on its node for later pods until the administrator's "
        "limit (pomona controller --node-cache-size) or a full disk needs its space; the copy that was not mounted "
        "for the longest time goes first.",
        checked_by(rule("self == oldSelf", "cache.scope cannot change: make a new Model")),
    ] = "model"
    access_mode: Annotated[
        Literal["ReadWriteOnce", "ReadWriteMany"],
        "Access mode of the volume. ReadWriteOnce: all pods run on one node. ReadWriteMany: pods run on any node.",
        checked_by(rule("self == oldSelf", "cache.accessMode cannot change: make a new Model")),
    ] = "ReadWriteOnce"
    storage_class_name: Annotated[
        Name | None,
        "StorageClass of the volume. Default: the cluster's default StorageClass. If it is changed, the weights "
        "are fetched to another volume. Pods serve from the earlier volume until then; it is deleted when no pod "
        "mounts it any more.",
    ] = None
    size: Annotated[
        Quantity | None,
        "Size of the volume. Default: the size of the weights plus 10 % plus 16 MiB. If it is raised, the volume "
        "grows if its StorageClass has allowVolumeExpansion, and is replaced by another volume if not. A volume "
        "never shrinks. A volume holds one set of weights: those of another source or revision get another volume.",
    ] = None


class CachedWeights(ApiStruct, frozen=True):
    """Verified weights for pods. A volume that is created again under the same name is another, empty volume."""

    name: Annotated[ShortText, "Name of the PersistentVolumeClaim that holds the weights; pods mount it."] = ""
    claim: Annotated[Uid, "metadata.uid of the PersistentVolumeClaim that holds the weights."] = ""
    image: Annotated[
        LongText, "Image that nodes mount, by its digest; empty if a PersistentVolumeClaim holds the weights."
    ] = ""
    path: Annotated[LongText, "Path of the weights, relative to the root of the volume."] = ""
    sha256: Annotated[Sha256, "SHA-256 that was verified; empty if no SHA-256 was known."] = ""


class NodeCopy(ApiStruct, frozen=True):
    """Verified weights on one node. A volume that is created again under the same name is another, empty volume."""

    node: Annotated[ShortText, "Node that has the volume."]
    name: Annotated[ShortText, "Name of the PersistentVolumeClaim that holds the weights; pods mount it."]
    claim: Annotated[Uid, "metadata.uid of the PersistentVolumeClaim that holds the weights."]
    path: Annotated[LongText, "Path of the weights, relative to the root of the volume."]
    sha256: Annotated[Sha256, "SHA-256 that was verified; empty if no SHA-256 was known."] = ""
    size_bytes: Annotated[Amount, "Size that the volume requests, which counts against the limit of its node."] = 0
    unused_since: Annotated[
        Time, "Since when no pod mounts the copy and no replica needs it. Absent while it is in use."
    ] = ""


class NodeShortage(ApiStruct, frozen=True):
    """A node on whose disk a copy found no space: unused copies of all Models go from there, and it is tried again."""

    node: Annotated[ShortText, "Name of the node."]
    job: Annotated[ShortText, "Job that found no space."]
    keep_bytes: Annotated[Amount, "Unused copies go until all copies on the node take at most this many bytes."]
