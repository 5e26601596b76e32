"""Makes a Serve application of a repository of models."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import fields
from inspect import signature
from typing import Any

from ray import serve

from moonpool.ray.ingress import Ingress
from moonpool.ray.options import Options, Prepared, Traits, deployment_options, prepare_model
from moonpool.ray.replica import Replica
from moonpool.ray.routing import SequenceRouter
from moonpool.runtime.errors import InvalidRequest
from moonpool.runtime.model.config.schema import suggestion
from moonpool.runtime.runtime import Runtime
from moonpool.runtime.version import VERSION

INGRESS, PACKED = "moonpool-ingress", "moonpool-models"
PROTOCOLS = ("http", "grpc")
_POLICY = "moonpool.ray:queue_policy"
# Replicas of the ingress only pass requests on.
_INGRESS_ONGOING = 1024
Repository = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]


def application(
    repository: Repository,
    *,
    models: Iterable[str] | Mapping[str, Options] | None = None,
    defaults: Options | None = None,
    packed: bool = False,
    models_per_replica: int = 20,
    sandbox: str | None = None,
    sandbox_grants: Iterable[str] = (),
    runtime: Mapping[str, Any] | None = None,
    protocols: Iterable[str] = PROTOCOLS,
    ingress: Options | None = None,
) -> serve.Application:
    """Return an application that serves models of a repository, for `serve.run`.

        app = moonpool.ray.application("models/", models={"ocr": moonpool.ray.Options(replicas=2)}, sandbox="strict")
        serve.run(app, name="models")

    `repository` is a path that all nodes have, such as on shared storage, or an address in the cloud. It may be
    several. `models` names those to serve, all by default, and may give options to some; `defaults` are those of all
    others. Each model is a deployment with the model's name. With `packed`, all models are one deployment with
    `defaults`: a replica loads a model when it is asked for, and has `models_per_replica` at most.

    `sandbox` and `sandbox_grants` are those of `moonpool.Runtime`, and `runtime` has its other arguments. `protocols`
    are those that clients may use. `ingress` has options of the deployment that passes their requests on.

    Reads the configurations here, and loads nothing. Raises `RepositoryError`, `ConfigError`, `ModelNotFound`, and
    `InvalidRequest` for arguments that do not fit.
    """
    place = _absolute(repository)
    arguments = {"sandbox": sandbox, "sandbox_grants": list(sandbox_grants), **(runtime or {})}
    spoken = tuple(protocols)
    for protocol in spoken:
        if protocol not in PROTOCOLS:
            raise InvalidRequest(f"protocol {protocol!r} is none of {', '.join(PROTOCOLS)}")
    with Runtime(place, models=[], **arguments) as reader:
        wanted = _wanted(reader, models, defaults or Options(), is_packed=packed)
        prepared = {name: prepare_model(reader, name, each) for name, each in wanted.items()}
    if packed:
        one = _packed(place, prepared, defaults or Options(), arguments, models_per_replica)
        deployments = {PACKED: one}
        traits = {name: each.traits(PACKED, is_packed=True) for name, each in prepared.items()}
    else:
        deployments = {name: _placed(place, name, each, wanted[name], arguments) for name, each in prepared.items()}
        traits = {name: each.traits(name) for name, each in prepared.items()}
    return _ingress(ingress or Options(), deployments, traits, spoken)


def build(arguments: dict[str, Any]) -> serve.Application:
    """Return the application that a config file of Ray Serve describes.

        applications:
          - name: models
            import_path: moonpool.ray:build
            args: { repository: /shared/models, models: { ocr: { replicas: 2 } }, sandbox: strict }

    `arguments` are those of `application`, with the fields of `Options` where it takes these. Raises what that raises,
    and `InvalidRequest` for a name that it does not have.
    """
    named = dict(arguments)
    if "repository" not in named:
        raise InvalidRequest("args: there is no 'repository'")
    _check("args", named, signature(application).parameters)
    if isinstance(models := named.get("models"), Mapping):
        named["models"] = {name: _options(f"args.models.{name}", given) for name, given in models.items()}
    for name in ("defaults", "ingress"):
        if named.get(name) is not None:
            named[name] = _options(f"args.{name}", named[name])
    return application(named.pop("repository"), **named)


def _options(place: str, given: object) -> Options:
    """Return the options that a config file has at a place."""
    if given is None:
        return Options()
    if not isinstance(given, Mapping):
        raise InvalidRequest(f"{place}: {given!r} is not a mapping of options")
    _check(place, given, [field.name for field in fields(Options)])
    return Options(**given)


def _check(place: str, given: Mapping[str, Any], names: Collection[str]) -> None:
    for name in given:
        if name not in names:
            raise InvalidRequest(f"{place}: there is no {name!r}{suggestion(name, names)}")


def _absolute(repository: Repository) -> list[str]:
    """Return the places of a repository as another process finds them."""
    places = [repository] if isinstance(repository, str | os.PathLike) else list(repository)
    texts = [os.fspath(each) for each in places]
    return [each if "://" in each else os.path.abspath(each) for each in texts]


def _wanted(
    reader: Runtime, models: Iterable[str] | Mapping[str, Options] | None, defaults: Options, *, is_packed: bool
) -> dict[str, Options]:
    """Return the options of each model to serve."""
    given = models if isinstance(models, Mapping) else {}
    names = list(reader._models.repositories.models() if models is None else models)
    if not names:
        raise InvalidRequest("there is no model to serve in the repository")
    if is_packed and given:
        raise InvalidRequest("packed models share one deployment: give its options as `defaults`")
    taken = {INGRESS, PACKED}.intersection(names)
    if taken:
        raise InvalidRequest(f"a model cannot be named '{taken.pop()}', as a deployment has this name")
    return {name: given.get(name, defaults) for name in names}


def _placed(
    place: Sequence[str], name: str, model: Prepared, options: Options, runtime: Mapping[str, Any]
) -> serve.Application:
    settings = {"models": {name: options.live, **_others(options)}, "log": dict(options.log)}
    arguments = list(place), [*options.with_models, name], dict(runtime)
    named = {"target_wait_ms": options.target_wait_ms, "revision": options.revision}
    return _deployment(Replica, name, _chosen([model], options), (arguments, named), settings)


def _others(options: Options) -> dict[str, Any]:
    return {name: {} for name in options.with_models}


def _packed(
    place: Sequence[str], models: Mapping[str, Prepared], options: Options, runtime: Mapping[str, Any], most: int
) -> serve.Application:
    settings = {"models": dict.fromkeys(models, options.live), "log": dict(options.log)}
    arguments = list(place), list(models), dict(runtime)
    named = {"target_wait_ms": options.target_wait_ms, "models_per_replica": most, "revision": options.revision}
    chosen = _chosen(list(models.values()), options, is_packed=True)
    return _deployment(Replica, PACKED, chosen, (arguments, named), settings)


def _chosen(models: Sequence[Prepared], options: Options, *, is_packed: bool = False) -> dict[str, Any]:
    """Return the options of the deployment, with what they need of Ray's classes."""
    chosen = deployment_options(models, options)
    if options.autoscaling is not None:
        autoscaling = {"policy": {"policy_function": _POLICY}, **options.autoscaling}
        chosen["autoscaling_config"] = autoscaling
    # A process keeps the router that it has made for a deployment, and the next deployment of packed models may have
    # sequences.
    if is_packed or any(model.config.sequence_batching is not None for model in models):
        router = serve.config.RequestRouterConfig(request_router_class=SequenceRouter)
        chosen.setdefault("request_router_config", router)
    return chosen


def _deployment(
    kind: type,
    name: str,
    chosen: Mapping[str, Any],
    bound: tuple[Sequence[Any], Mapping[str, Any]],
    settings: Mapping[str, Any] | None = None,
    identity: object = None,
) -> serve.Application:
    """Return a deployment with the arguments of its class.

    Without a version, `serve.run` replaces all replicas each time. With one, it replaces them only if the version or
    Ray's own options for their actors change, and otherwise gives them the settings. `identity` tells the arguments
    apart if their texts do not.
    """
    arguments, named = bound
    told = repr((VERSION, arguments if identity is None else identity, sorted(named.items())))
    version = hashlib.sha256(told.encode()).hexdigest()[:16]
    options = {"name": name, "version": version, "_internal": True, **chosen}
    if settings is not None:
        options["user_config"] = dict(settings)
    return serve.deployment(kind).options(**options).bind(*arguments, **named)


def _ingress(
    options: Options,
    deployments: Mapping[str, serve.Application],
    traits: Mapping[str, Traits],
    protocols: tuple[str, ...],
) -> serve.Application:
    given = dict(options.deployment)
    actor = {"num_cpus": options.num_cpus or 0, **given.pop("ray_actor_options", {})}
    chosen: dict[str, Any] = {
        "max_ongoing_requests": options.max_ongoing_requests or _INGRESS_ONGOING,
        "ray_actor_options": actor,
    }
    if options.autoscaling is None:
        chosen["num_replicas"] = options.replicas
    else:
        chosen["autoscaling_config"] = dict(options.autoscaling)
    arguments = dict(deployments), dict(traits), protocols
    identity = sorted(traits.items()), protocols
    return _deployment(Ingress, INGRESS, chosen | given, (arguments, {}), identity=identity)
