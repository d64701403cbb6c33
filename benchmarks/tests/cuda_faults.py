"""Faults that would break, mislead or slow down training on GPUs, and the test on CPUs that catches each.

Numbers are those of ``docs/explanation/cuda.md``.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PlantedFault:
    """A fault: what it is about, where it is planted, and what catches it.

    Attributes:
        subject: Number of the row in the table of ``docs/explanation/cuda.md``, or a name.
        fault: What goes wrong.
        module: The file that it is planted in.
        text: What the file says, once.
        replacement: What replaces that.
        test: Arguments of pytest.
    """

    subject: str
    fault: str
    module: str
    text: str
    replacement: str
    test: tuple[str, ...]


_SHARD = "fsdptool/distributed/shard.py"
_SHARDED = "fsdptool/training/optimizers/sharded.py"
_SESSION = "fsdptool/distributed/session.py"
_PACKED = "fsdptool/families/objectives/packed_attention.py"
_COMMAND = "fsdptool/launch/command.py"
_STEP = "fsdptool/training/step.py"
_OFFLOAD = "fsdptool/modeling/activation_offload.py"
_LOADER = "fsdptool/training/data/loader.py"
_ADAFACTOR = "fsdptool/training/optimizers/adafactor.py"
_DIFFUSION = "plugins/fsdptool_diffusion/objectives.py"
_COMPILATION = "fsdptool/modeling/compilation.py"
_HEAD = "fsdptool/families/objectives/fused_head.py"
_TAIL = "fsdptool/inspection/logit_tail.py"
_MEASURING = "fsdptool/training/measuring.py"
_CALIBRATE = "fsdptool/planning/calibrate.py"
_DEVICES = "fsdptool/distributed/devices.py"

_IN_OFFLOAD = ("tests/training/test_offload.py", "-k", "async and adamw")
_IN_SESSION = "tests/training/test_session.py"
_IN_CHECKPOINTS = ("tests/training/test_checkpoints.py", "-k", "reports_every_tensor")
_IN_PACKED = "tests/objectives/test_packed_attention.py"
_DOCUMENTS = (_IN_PACKED, "-k", "documents_attend and (mistral or gemma3) or only_a_gpus_batch")
_IN_ATTENTION = ("tests/memory/test_cuda_attention.py", "-k", "kernel_follows or fp32_keeps or takes_buffers")
_IN_LINES = ("tests/launch/test_launch_lines.py", "-k", "flight_record or expandable or attention_is")
_IN_DEVICES = ("tests/launch/test_devices.py",)
_IN_ACTIVATIONS = ("tests/modeling/test_activation_offload.py",)
_IN_WORK = ("tests/modeling/test_device_work.py",)
_IN_AHEAD = ("tests/data/test_reading_ahead.py",)
_WAITS = ("tests/training/test_waits.py", "-k", "test_a_launched_step_does_not_wait and (full or adafactor)")
_TRACES = ("tests/training/test_waits.py", "-k", "leaves_no_trace and adamw and not foreach")
_IN_DECISIONS = ("tests/modeling/test_compile_decisions.py", "-k", "every_reason or float8")
_IN_GATHERS = ("tests/memory/test_memory_collectives.py", "-k", "float8")
_IN_COMPILED = ("tests/training/test_compilation.py", "-k", "causal")
_IN_COMPILED_TRACES = ("tests/memory/test_compiled_blocks.py",)
_IN_HEAD = ("tests/objectives/test_fused_head.py",)
_IN_TAIL = ("tests/inspection/test_logit_tail.py",)
_IN_MEASUREMENTS = ("tests/launch/test_measurements.py",)

FAULTS = (
    PlantedFault(
        "1",
        "a shard that belongs on the CPU moves to the device type of its mesh",
        _SHARD,
        "    made: torch.Tensor = make(rows, spec, requires_grad=rows.requires_grad)\n",
        "    made = make.from_local(rows, spec.mesh, spec.placements, shape=shape, stride=stride)\n",
        _IN_OFFLOAD,
    ),
    PlantedFault(
        "1",
        "saves and loads get copies of the optimizer's states: a resumed run has moments of zero",
        _SHARDED,
        "    return sharded_like(value, parameter, shape)\n",
        "    return sharded_like(value.clone(), parameter, shape)\n",
        _IN_OFFLOAD,
    ),
    PlantedFault(
        "2",
        "the copies for an asynchronous save go back to the device of the mesh",
        "fsdptool/training/checkpoint/checkpointer.py",
        "        return sharded_like(buffer, value)\n",
        "        mesh = getattr(value, 'device_mesh', None)\n"
        "        return sharded_like(buffer.to(mesh.device_type if mesh else 'cpu'), value)\n",
        _IN_OFFLOAD,
    ),
    PlantedFault(
        "3",
        "transformers' flash attention runs over several packed sequences and mixes documents",
        "fsdptool/families/objectives/language.py",
        "    if positions.shape[0] > 1 and attention",
        "    if positions.shape[0] > 99 and attention",
        (_IN_PACKED, "-k", "flash_attention_of_several"),
    ),
    PlantedFault(
        "4",
        "plans for GPUs count a mask for packed documents",
        _PACKED,
        "        (query.is_cuda or _assumed)\n        and query.dtype in _HALF\n",
        "        query.is_cuda\n        and query.dtype in _HALF\n",
        (_IN_PACKED, "-k", "plan_for_gpus_holds_no_mask"),
    ),
    PlantedFault(
        "4",
        "a window of the variable-length kernel reaches one token too far",
        _PACKED,
        "window_size=(-1 if window is None else window - 1, 0)",
        "window_size=(-1 if window is None else window, 0)",
        _DOCUMENTS,
    ),
    PlantedFault(
        "4",
        "the first document of a sequence continues the last one of the sequence before",
        _PACKED,
        "    first = torch.ones_like(positions, dtype=torch.bool)\n",
        "    first = torch.zeros_like(positions, dtype=torch.bool)\n",
        _DOCUMENTS,
    ),
    PlantedFault(
        "5",
        "ranks wait for one limit for all of a save, however it gets on",
        _SESSION,
        "                elif time.monotonic() - since > self._patience:\n",
        "                if time.monotonic() - began > self._patience:\n",
        (_IN_SESSION, "-k", "ranks_wait_for_work"),
    ),
    PlantedFault(
        "5",
        "ranks wait for ever for a save that does not get on",
        _SESSION,
        "                if int(missing[1]) != seen:\n",
        "                if missing[0]:\n",
        (_IN_SESSION, "-k", "ranks_do_not_wait"),
    ),
    PlantedFault(
        "5",
        "a full save reports no progress, so that the ranks that wait for it give up",
        "fsdptool/training/checkpoint/storage.py",
        "        self._next += 1\n        self._pace.report()\n",
        "        self._next += 1\n",
        _IN_CHECKPOINTS,
    ),
    PlantedFault(
        "5",
        "a sharded save reports no progress",
        "fsdptool/training/checkpoint/storage.py",
        "    pace.report()\n    value = planner",
        "    value = planner",
        _IN_CHECKPOINTS,
    ),
    PlantedFault(
        "6",
        "fp32 with grouped keys is left to plain products",
        "fsdptool/modeling/__init__.py",
        "    return original if torch_is(2, 14) else wanted\n",
        "    return original\n",
        _IN_ATTENTION,
    ),
    PlantedFault(
        "7",
        "workers keep the soft limit of open files",
        "fsdptool/distributed/rendezvous.py",
        "resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))",
        "resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))",
        (_IN_SESSION, "-k", "connects_each_pair or many_ranks"),
    ),
    PlantedFault(
        "7",
        "a checkpointer connects all ranks once more",
        "fsdptool/training/checkpoint/checkpointer.py",
        "            self._group = dist.new_group(",
        "            self._further = dist.new_group(backend='gloo')\n"
        "            self._group = dist.new_group(",
        (_IN_SESSION, "-k", "connects_each_pair or many_ranks"),
    ),
    PlantedFault(
        "7",
        "thousands of ranks connect to one another at once",
        "fsdptool/distributed/rendezvous.py",
        "    if world_size > _MANY_RANKS:\n",
        "    if world_size > 100 * _MANY_RANKS:\n",
        (_IN_SESSION, "-k", "connects_each_pair or many_ranks"),
    ),
    PlantedFault(
        "8",
        "jobs that number their GPUs from 0 refuse each other",
        "fsdptool/launch/machine.py",
        "if (ours == theirs if uuid is None or known is None else uuid == known)",
        "if ours == theirs",
        _IN_DEVICES,
    ),
    PlantedFault(
        "9",
        "a machine with GPUs of AMD is told to install CUDA",
        _DEVICES,
        '"ROCm" if found == (Driver.AMD,) else "CUDA"',
        '"CUDA"',
        _IN_DEVICES,
    ),
    PlantedFault(
        "9",
        "a run on a machine whose GPUs torch cannot use does not say why",
        _DEVICES,
        "    if not found or count_gpus():\n        return None\n",
        "    return None\n",
        _IN_DEVICES,
    ),
    PlantedFault(
        "10",
        "parts of parameters that other ranks would send are whatever memory contained",
        "benchmarks/gpu/own_rows.py",
        "                parts[rank].copy_(mine)\n",
        "                continue\n",
        ("tests/training/test_gpu_rows.py",),
    ),
    PlantedFault(
        "11",
        "Adafactor holds the updates of all parameters at once",
        _ADAFACTOR,
        "        sizes = [\n            _squares(self._update(parameter, row)) for",
        "        updates = [self._update(pair[1], row) for pair, row in zip(work, rows, strict=True)]\n"
        "        sizes = [\n            _squares(updates[0]) * 0 + _squares(self._update(parameter, row)) "
        "for",
        ("tests/training/test_optimizers.py", "-k", "takes_the_memory and adafactor and fp32"),
    ),
    PlantedFault(
        "11",
        "Adafactor reads a scale of every parameter on the host",
        _ADAFACTOR,
        "        excess = ((size / numel).sqrt() / _THRESHOLD).clamp(min=1.0)\n",
        "        excess = max(math.sqrt(float(size) / numel) / _THRESHOLD, 1.0)\n",
        _WAITS,
    ),
    PlantedFault(
        "12",
        "selective checkpointing computes float8 products again",
        "fsdptool/records/checkpointing.py",
        '"aten.addmm.default", "aten._scaled_mm.default")',
        '"aten.addmm.default")',
        ("tests/modeling/test_checkpointing_policies.py", "-k", "float8"),
    ),
    PlantedFault(
        "13",
        "the tokens of experts are counted by an operator that reads them on the host",
        "fsdptool/modeling/expert_parallel.py",
        "    mine = chosen.new_zeros(count).scatter_add_(0, chosen, ones).view(-1, held)\n",
        "    mine = chosen.bincount(minlength=count).view(-1, held)\n",
        _IN_WORK,
    ),
    PlantedFault(
        "13",
        "the host waits twice in each layer of experts",
        "fsdptool/modeling/expert_parallel.py",
        "torch.stack((mine.sum(1), theirs.sum(1))).tolist()",
        "(mine.sum(1).tolist(), theirs.sum(1).tolist())",
        ("tests/training/test_waits.py", "-k", "test_a_launched_step_does_not_wait and experts"),
    ),
    PlantedFault(
        "13",
        "one unit is prefetched although the exchange of tokens makes the host wait",
        "fsdptool/records/recipe.py",
        "        return 2 if self.expert_parallel > 1 else 1\n",
        "        return 1\n",
        ("tests/records/test_parallel.py", "-k", "prefetched"),
    ),
    PlantedFault(
        "14",
        "groups of a mesh keep torch's timeout",
        _SESSION,
        "    limit_collectives(groups)\n    session",
        "    session",
        (_IN_SESSION, "-k", "every_group and (dims0 or dims1)"),
    ),
    PlantedFault(
        "15",
        "a rank that reads the result of a collective does not count as waiting",
        "fsdptool/runs/watchdog.py",
        ', "/fsdptool/training/step.py")\n',
        ")\n",
        ("tests/runs/test_views.py", "-k", "reads_the_result or silent_rank"),
    ),
    PlantedFault(
        "16",
        "ranks wait inside a collective until rank 0 has written its samples",
        "fsdptool/training/sampling.py",
        "LongWait(dist.group.WORLD if dist.is_initialized() else None, patience",
        "LongWait(None, patience",
        ("tests/data/test_sampling.py", "-k", "two_ranks"),
    ),
    PlantedFault(
        "17",
        "a worker whose GPU torch cannot start trains on the CPU",
        _SESSION,
        "        _check_no_gpu()\n        return",
        "        return",
        (_IN_SESSION, "-k", "torch_cannot_use"),
    ),
    PlantedFault(
        "18",
        "the host waits for the device before the update",
        _STEP,
        "            self.optimizer.step(rate, factor",
        "            bool(skipped)\n            self.optimizer.step(rate, factor",
        _WAITS,
    ),
    PlantedFault(
        "18",
        "an update does not heed on the device that a step is skipped",
        _SHARDED,
        "optimizer.found_inf = None if skip is None else skip.float()",
        "optimizer.found_inf = None",
        _TRACES,
    ),
    PlantedFault(
        "18",
        "a skipped step moves the average",
        "fsdptool/training/state.py",
        "share = skipped.logical_not().double()",
        "share = torch.ones_like(skipped).double()",
        _TRACES,
    ),
    PlantedFault(
        "19",
        "inputs of blocks are fetched when they are needed, not one block ahead",
        _OFFLOAD,
        "            for block in (self, before):\n",
        "            for block in (self,):\n",
        _IN_ACTIVATIONS,
    ),
    PlantedFault(
        "19",
        "inputs of blocks stay on the device after they were copied",
        _OFFLOAD,
        "            if kept not in self.inputs:\n                kept.leave()\n",
        "            if kept not in self.inputs:\n                continue\n",
        _IN_ACTIVATIONS,
    ),
    PlantedFault(
        "19",
        "a plan charges nothing for copies that take longer than the computation",
        "fsdptool/planning/time/overlap.py",
        "        max(stage.forward + seconds, copy)\n",
        "        stage.forward + seconds\n",
        ("tests/planning/test_step_time.py", "-k", "copies_to_the_host"),
    ),
    PlantedFault(
        "20",
        "cuDNN's attention runs on Hopper where plans assume flash attention",
        _COMMAND,
        'setdefault("TORCH_CUDNN_SDPA_DEPRIORITIZED", "1")',
        'setdefault("TORCH_CUDNN_SDPA_DEPRIORITIZED", "0")',
        _IN_LINES,
    ),
    PlantedFault(
        "20",
        "traces take flash attention for a masked call",
        "fsdptool/memory/tracing/kernels.py",
        "    if flash and attn_mask is None and query.dtype in _HALF and",
        "    if flash and query.dtype in _HALF and",
        _IN_ATTENTION,
    ),
    PlantedFault(
        "21",
        "the buffers of flash attention's backward are not counted",
        "fsdptool/memory/tracing/operators.py",
        "        return _flash_workspace(args[1], args[2])\n",
        "        return 0\n",
        _IN_ATTENTION,
    ),
    PlantedFault(
        "21",
        "gradients of grouped keys are counted once for each group, not for each query head",
        "fsdptool/memory/tracing/operators.py",
        "key.shape[2] * heads * size * key.element_size()\n\n\ndef _packed",
        "key.shape[2] * key.shape[1] * size * key.element_size()\n\n\ndef _packed",
        _IN_ATTENTION,
    ),
    PlantedFault(
        "22",
        "workers do not get expandable segments",
        _COMMAND,
        "            chosen |= EXPANDABLE\n",
        "            pass\n",
        _IN_LINES,
    ),
    PlantedFault(
        "22",
        "plans of fsdptool's own loop assume fixed segments",
        "fsdptool/planning/hardware.py",
        "        return loop.program == OWN_LOOP.program\n    return any(",
        "        return False\n    return any(",
        ("tests/planning/test_allocator_default.py",),
    ),
    PlantedFault(
        "22",
        "the flight record goes to the user's cache",
        _COMMAND,
        '        chosen["TORCH_FR_DUMP_TEMP_FILE"] = str(folder.absolute() / LOGS / FLIGHT_RECORD)\n',
        "",
        _IN_LINES,
    ),
    PlantedFault(
        "22",
        "NCCL looks for another machine over any interface",
        _COMMAND,
        '            chosen.setdefault("NCCL_SOCKET_IFNAME", interface)\n',
        "            pass\n",
        _IN_LINES,
    ),
    PlantedFault(
        "22",
        "workers run on the cores of the other socket",
        _SESSION,
        "    os.sched_setaffinity(0, cores)\n",
        "",
        (_IN_SESSION, "-k", "stays_on_the_cores"),
    ),
    PlantedFault(
        "23",
        "two steps are read ahead",
        _LOADER,
        "threading.Semaphore(1)",
        "threading.Semaphore(2)",
        _IN_AHEAD,
    ),
    PlantedFault(
        "23",
        "samples that were read ahead count as used in a checkpoint",
        _LOADER,
        'return {"samples": self._position,',
        'return {"samples": self._position + self._share.global_batch,',
        _IN_AHEAD,
    ),
    PlantedFault(
        "24",
        "a noise schedule is computed and copied for every micro-batch",
        _DIFFUSION,
        "        if (known := self._kept.get(latents.device)) is not None:\n",
        "        if (known := None) is not None:\n",
        _IN_WORK,
    ),
    PlantedFault(
        "24",
        "the number of samples is copied from the host",
        _DIFFUSION,
        "        return torch.full((), latents.shape[0], device=latents.device)\n",
        "        return torch.tensor(latents.shape[0], device=latents.device)\n",
        _IN_WORK,
    ),
    PlantedFault(
        "25",
        "8-bit AdamW waits for the device after every parameter",
        _SHARDED,
        "        for number, group in enumerate(optimizer.param_groups):\n"
        '            for index, stand_in in enumerate(group["params"]):\n'
        "                if stand_in.grad is not None:\n"
        "                    optimizer.update_step(group, stand_in, number, index)\n",
        "        optimizer.step()\n",
        ("tests/training/test_eight_bit.py", "-k", "every_parameter"),
    ),
    PlantedFault(
        "26",
        "float8 runs in eager blocks, slower than bf16",
        _COMPILATION,
        "and not (settings.use_cpu or decision.compiled):\n",
        "and False:\n",
        _IN_DECISIONS,
    ),
    PlantedFault(
        "26",
        "weights of float8 layers are planned as if they were gathered in 16 bits",
        "fsdptool/memory/simulation/collective_bytes.py",
        "    gathered = 1 if plan.gathers_in_float8(unit, parameter, ranks) else width\n",
        "    gathered = width\n",
        _IN_GATHERS,
    ),
    PlantedFault(
        "26",
        "rows that the ranks do not divide are cast without padding: ranks gather other sizes than they send",
        "fsdptool/records/sharding.py",
        "            and parameter.shape[0] % ranks == 0\n",
        "",
        _IN_GATHERS,
    ),
    PlantedFault(
        "27",
        "an int8 weight is decoded in two passes",
        "fsdptool/modeling/methods/quantised_formats.py",
        "        return torch.mul(codes, factors)\n",
        "        return codes.to(dtype).mul_(factors)\n",
        _IN_WORK,
    ),
    PlantedFault(
        "28",
        "every shard of a replica is read on the host",
        "fsdptool/distributed/proof.py",
        "        sums.append(total)\n",
        "        sums.append(torch.tensor(total.cpu()))\n",
        _IN_WORK,
    ),
    PlantedFault(
        "28",
        "replicas whose values differ are taken for equal",
        "fsdptool/distributed/proof.py",
        "            total = total * 31 + (words * places).sum()\n",
        "            total = total * 31 + places.sum()\n",
        ("tests/training/test_materialize.py", "-k", "drifted"),
    ),
    PlantedFault(
        "29",
        "tensor parallelism refuses compiled blocks",
        _COMPILATION,
        "    if wanted is not None:\n",
        "    if wanted is not None and run.mesh.tp == 1:\n",
        _IN_DECISIONS,
    ),
    PlantedFault(
        "30",
        "dimensions of one rank get process groups of their own",
        _SESSION,
        'TRAINED if dims.size(name) > 1 or name == "dp_shard")\n',
        "TRAINED)\n",
        (_IN_SESSION, "-k", "every_group and (dims0 or dims1)"),
    ),
    PlantedFault(
        "31",
        "ranks with other samples drop the same elements",
        "fsdptool/training/trainer.py",
        "        group = self.session.rank // self.session.dims.tp\n",
        "        group = 0\n",
        ("tests/training/test_steps.py", "-k", "drop_other"),
    ),
    PlantedFault(
        "31",
        "a machine of several kinds of GPU is planned by the first on the bus",
        _DEVICES,
        "    if len(set(names)) > 1 and (ids := visible_ids()):\n",
        "    if False and (ids := visible_ids()):\n",
        _IN_DEVICES,
    ),
    PlantedFault(
        "compiled blocks",
        "blocks are eager although they were to be compiled",
        _COMPILATION,
        "        model.get_submodule(path).compile()\n",
        "        model.get_submodule(path)\n",
        _IN_COMPILED,
    ),
    PlantedFault(
        "compiled blocks",
        "compiled blocks break into several graphs",
        "fsdptool/families/objectives/language.py",
        "        fused = getattr(unwrapped(model), HEAD, None)\n",
        "        import torch\n\n"
        "        for module in model.modules():\n"
        "            if type(module).__name__ == 'LlamaMLP' and not hasattr(module, 'planted'):\n"
        "                module.planted = True\n"
        "                module.register_forward_hook(lambda *_: torch._dynamo.graph_break())\n"
        "        fused = getattr(unwrapped(model), HEAD, None)\n",
        _IN_COMPILED,
    ),
    PlantedFault(
        "compiled blocks",
        "blocks of experts are compiled without being asked for",
        _COMPILATION,
        "    if experts_of(anatomy.parameters) is not None:\n",
        "    if experts_of(anatomy.parameters) is not None and False:\n",
        _IN_DECISIONS,
    ),
    PlantedFault(
        "compiled blocks",
        "blocks are compiled on a torch whose memory was not measured",
        _COMPILATION,
        "    if not _measured():\n",
        "    if False:\n",
        _IN_DECISIONS,
    ),
    PlantedFault(
        "compiled blocks",
        "compiled blocks are planned as eager ones",
        "fsdptool/memory/tracing/compiled_blocks.py",
        "        if kind in self.uncompiled:\n",
        "        if True:\n",
        _IN_COMPILED_TRACES,
    ),
    PlantedFault(
        "compiled blocks",
        "the cache gives the plan of eager blocks to compiled ones",
        "fsdptool/memory/tracing/tracer.py",
        '        parts["compiled"] = wrapping\n',
        "        pass\n",
        _IN_COMPILED_TRACES,
    ),
    PlantedFault(
        "fused loss",
        "ignored tokens have a gradient",
        _HEAD,
        "        part.mul_(valid / sums)\n",
        "        part.div_(sums)\n",
        _IN_HEAD,
    ),
    PlantedFault(
        "fused loss",
        "ignored tokens count in the loss",
        _HEAD,
        "    loss = ((sums.log() + top - chosen) * valid).sum()\n",
        "    loss = (sums.log() + top - chosen).sum()\n",
        _IN_HEAD,
    ),
    PlantedFault(
        "fused loss",
        "the tokens after the last whole product are left out",
        _HEAD,
        "        for first in range(0, tokens, rows):\n",
        "        for first in range(0, tokens - tokens % rows, rows):\n",
        _IN_HEAD,
    ),
    PlantedFault(
        "fused loss",
        "the tokens after the last whole chunk are left out",
        _HEAD,
        "            for at in range(0, states.shape[0], chunk):\n",
        "            for at in range(0, states.shape[0] - chunk + 1, chunk):\n",
        _IN_HEAD,
    ),
    PlantedFault(
        "fused loss",
        "the gradient ignores the slope of the soft cap",
        _HEAD,
        "            part.mul_(slope)\n",
        "            part.mul_(1.0)\n",
        _IN_HEAD,
    ),
    PlantedFault(
        "fused loss",
        "the gradient ignores the scale of the logits",
        _HEAD,
        "            part.mul_(tail.scale)\n    return loss\n",
        "            part.mul_(1.0)\n    return loss\n",
        _IN_HEAD,
    ),
    PlantedFault(
        "fused loss",
        "gradients are not scaled by what arrives in backward",
        _HEAD,
        "value.mul_(factor).to(dtype)",
        "value.to(dtype)",
        _IN_HEAD,
    ),
    PlantedFault(
        "fused loss",
        "a second backward is accepted",
        _HEAD,
        "        del ctx.gradients\n",
        "",
        _IN_HEAD,
    ),
    PlantedFault(
        "fused loss",
        "the weight has the gradient of the last product alone",
        _HEAD,
        "                    part.addmm_(columns, states)\n",
        "                    part.copy_(columns @ states)\n",
        _IN_HEAD,
    ),
    PlantedFault(
        "fused loss",
        "the last entries of the vocabulary have no gradient",
        _HEAD,
        "            for at in range(0, self.weight.shape[0], GRADIENT_ROWS):\n",
        "            for at in range(0, self.weight.shape[0] - GRADIENT_ROWS + 1, GRADIENT_ROWS):\n",
        _IN_HEAD,
    ),
    PlantedFault(
        "fused loss",
        "the gradient of the weight adds up in bf16",
        _HEAD,
        "        self.weight = torch.zeros_like(weight, dtype=wide) if wanted[1] else None\n",
        "        self.weight = torch.zeros_like(weight) if wanted[1] else None\n",
        _IN_HEAD,
    ),
    PlantedFault(
        "fused loss",
        "a frozen weight gets a gradient",
        _HEAD,
        "        self.weight = torch.zeros_like(weight, dtype=wide) if wanted[1] else None\n",
        "        self.weight = torch.zeros_like(weight, dtype=wide)\n",
        _IN_HEAD,
    ),
    PlantedFault(
        "fused loss",
        "the bias has the gradient of the last product alone",
        _HEAD,
        "            self.bias.add_(logits.sum(0, dtype=self.bias.dtype))\n",
        "            self.bias.copy_(logits.sum(0, dtype=self.bias.dtype))\n",
        _IN_HEAD,
    ),
    PlantedFault(
        "fused loss",
        "a model that shortens its logits is accepted",
        _TAIL,
        "        named = [item.arg for item in keywords if self._is_logits(item.value)]\n",
        "        named = [item.arg for item in keywords if self._contains(item.value)]\n",
        _IN_TAIL,
    ),
    PlantedFault(
        "fused loss",
        "a soft cap that multiplies by another number than it divides by is accepted",
        _TAIL,
        "        if abs(before * cap - 1.0) > 1e-12:\n",
        "        if False:\n",
        _IN_TAIL,
    ),
    PlantedFault(
        "fused loss",
        "the head computes the loss where that takes more memory",
        "fsdptool/modeling/fused_loss.py",
        "    return None if fused < _plain_bytes(tokens, head.shape, chunk, size) else",
        "    return None if True else",
        ("tests/modeling/test_fused_decisions.py", "-k", "every_reason"),
    ),
    PlantedFault(
        "doctor --gpu",
        "a machine without GPUs is measured",
        "fsdptool/launch/doctor.py",
        "    processes = 2 if cpu else count_gpus()\n",
        "    processes = 2\n",
        (*_IN_MEASUREMENTS, "-k", "without_gpus"),
    ),
    PlantedFault(
        "doctor --gpu",
        "CPU offload is not tried",
        _MEASURING,
        "    for offload in (True, False):\n",
        "    for offload in (False,):\n",
        _IN_MEASUREMENTS,
    ),
    PlantedFault(
        "doctor --gpu",
        "the kernel of packed documents is not measured",
        _MEASURING,
        '        replace(half, masking="documents"),\n',
        "",
        _IN_MEASUREMENTS,
    ),
    PlantedFault(
        "doctor --gpu",
        "a rehearsal on the CPU calibrates plans",
        _CALIBRATE,
        '    if ranks is None or (document.device == "cpu" and not ranks.kernels):\n',
        "    if ranks is None:\n",
        _IN_MEASUREMENTS,
    ),
    PlantedFault(
        "doctor --gpu",
        "plans take the best product for what training sustains",
        _CALIBRATE,
        "_fraction(SUSTAINED * max(products) / peaks[half])",
        "_fraction(max(products) / peaks[half])",
        ("tests/planning/test_plan_commands.py", "-k", "doctor_measured"),
    ),
)
"""In the order of the table. What only a GPU can show has no fault here: how long copies, kernels and
collectives take, NCCL's own watchdog and communicators, and page-locked memory."""
