"""`switch-tf compile --compare` and `--search`: several questions about one run, side by side or ranked."""

import gin

from switch_tf.cli import compile_many, compile_text, gin_files, gin_run, quiet
from switch_tf.cli.main import Mistake


def compare(arguments) -> dict:
    """The same run under several layouts, one table. Status 1 where none fits."""
    from switch_tf.partitioning.layout import Layout

    if gin.get_configurable(Layout)() != Layout():
        raise Mistake("--compare names the layouts, so leave out the layout's --gin_file.")
    files = {name: name if name.endswith(".gin") else f"gin/layouts/{name}.gin"
             for name in filter(None, arguments.compare.split(","))}
    if len(files) < 2:
        raise Mistake(f"--compare needs at least two layouts, as in --compare=expert,expert_model, not "
                      f"{arguments.compare!r}.")
    compile_text.say(f"Compiling {len(files)} layouts ...")
    results = compile_many.ask({name: _words(arguments, [file]) for name, file in files.items()}, compile_text.say)
    compile_text.show(compile_text.table(results), arguments)
    return {"layouts": results, "exit_status": int(not any(result.get("fits") for result in results.values()))}


def search(arguments, macros: set[str]) -> dict:
    """Meshes, then group sizes on the best mesh, then capacity factors. Status 1 where nothing fits."""
    from switch_tf.aot import compile as compiler
    from switch_tf.aot import search as choices
    from switch_tf.partitioning.layout import mesh_shape

    try:
        with quiet.held_back():
            num_devices = compiler.num_devices(arguments.topology)
    except ValueError as error:
        raise Mistake(gin_files.first_line(error)) from error
    # Not checked: what is searched for is what fits.
    described = gin_run.on_devices(num_devices, "TPU", is_checked=False)
    config, layout, run_ = described.config, described.layout, described.run
    num_microbatches = described.settings.num_microbatches
    num_tokens = run_.batch_size * max(run_.task_feature_lengths.values()) // num_microbatches
    own = choices.Choice(mesh_shape(layout.mesh), config.group_size, config.num_groups_multiple,
                         config.train_capacity_factor)
    meshes = choices.meshes(own, layout, num_devices, num_microbatches)
    own = next((choice for choice in meshes if choice.mesh_shape == own.mesh_shape), own)
    mesh = "MESH_SHAPE" if "MESH_SHAPE" in macros else "Layout.mesh_shape"
    results = {}

    def try_out(what, tried):
        new = {choice.describe(): choice for choice in tried if choice not in results}
        if new:
            compile_text.say(f"Trying {len(new)} {what} ...")
            found = compile_many.ask({name: _words(arguments, bindings=_bindings(choice, mesh, config))
                                      for name, choice in new.items()}, compile_text.say)
            results.update({new[name]: result for name, result in found.items()})
        return choices.ranked(results)[0]

    best = try_out("meshes", [own, *meshes])
    if config.num_experts:
        best = try_out("group sizes", choices.group_sizes(best, num_tokens))
        best = try_out("capacity factors", choices.capacity_factors(best))
    order = choices.ranked(results)
    lines = [compile_text.table({choice.describe(): results[choice] for choice in order})]
    if results[best].get("fits"):
        lines.append("The best: " + " ".join(map(_typed, _bindings(best, mesh, config))))
        other = own if best != own and "predicted" in results[own] else next(
            (choice for choice in order if choice != best and "predicted" in results[choice]), None)
        if other is not None:
            lines.append(f"Against {other.describe()}{' (as it was)' if other == own else ''}: "
                         f"{compile_text.why(results[best], results[other])}.")
    compile_text.show("\n".join(lines), arguments)
    return {"candidates": [{**choice._asdict(), **results[choice]} for choice in order],
            "exit_status": int(not results[best].get("fits"))}


def _bindings(choice, mesh, config):
    """What gives a run this choice."""
    bindings = [f"{mesh}='{choice.mesh_shape}'"]
    if config.num_experts:
        bindings += [f"SwitchConfig.group_size={choice.group_size}",
                     f"SwitchConfig.num_groups_multiple={choice.num_groups_multiple}",
                     f"SwitchConfig.train_capacity_factor={choice.capacity_factor}"]
    return bindings


def _words(arguments, files=(), bindings=()):
    """The command line of this question with more files and bindings."""
    return [*(f"--gin_file={file}" for file in (*arguments.gin_file, *files)),
            f"--gin_search_paths={arguments.gin_search_paths}", f"--topology={arguments.topology}",
            *(["--full"] if arguments.full else []), *(f"--gin.{binding}" for binding in arguments.gin_bindings),
            *(f"--gin.{binding}" for binding in bindings)]


def _typed(binding):
    """A binding as one types it in a shell."""
    name, _, value = binding.partition("=")
    return f'--gin.{name}="{value}"' if "'" in value else f"--gin.{name}={value}"
