#!/usr/bin/env bash
# What a GPU has to show, in under 8 minutes: exactness on the device, and which drafts pay there. Results in one folder.
#
#   SPECPLUG_SMOLLM2=model.gguf SPECPLUG_SPEC_BENCH=question.jsonl bash tests/gpu/run.sh OUT
#
# Needs the package installed. SPECPLUG_DRAFT: a distilled draft of the same target, left out if there is none.
# LIMIT prompts (default 24), TOKENS new tokens each (default 128); DEVICE=cpu tries the script itself. No run takes more than EACH
# seconds (150) or goes on behind BUDGET seconds (440), and none begins in the last 15 of these: one that is cut short reports what it
# has, as after Ctrl-C.
set -euo pipefail
out=$(realpath -m "${1:?give a folder for the results}")
root=$(cd "$(dirname "$0")/../.." && pwd)
device=${DEVICE:-cuda}
limit=${LIMIT:-24}
tokens=${TOKENS:-128}
threads=${THREADS:-null}
python=${PYTHON:-python}
each=${EACH:-150}
budget=${BUDGET:-440}
export HF_HUB_OFFLINE=1
mkdir -p "$out"
cd "$out"
# A shell that was started in the background ignores Ctrl-C, and what it starts does, too.
heeding=()
! env --default-signal=INT true 2>/dev/null || heeding=(env --default-signal=INT)
limited() { # a command, for as long as there is time
  local left=$((budget - SECONDS))
  timeout -s INT -k 20 "$((left < each ? left : each))" "${heeding[@]}" "$@"
}
run() { # name, then what the command takes: one evaluation, its report in a folder of its own
  local name=$1
  shift
  [ "$SECONDS" -lt "$((budget - 15))" ] || { echo "$name: left out, the time is up"; return 0; }
  [[ " $* " == *" recipe=bench "* ]] || set -- recipe.trace=1 "$@"
  limited "$python" -m specplug.cli "target.device=$device" "hydra.run.dir=$out/$name" "$@" >"$out/$name.json" 2>"$out/$name.log" \
    || echo "$name: exit code $?, see $name.log"
  tail -n 12 "$out/$name.log" || true
}

"$python" - <<'PY' | tee environment.txt
import torch, transformers
print("torch", torch.__version__, "transformers", transformers.__version__)
print(torch.cuda.get_device_name() if torch.cuda.is_available() else "no CUDA device")
PY
# What is captured, whether ids agree alone and in batches, host reads and launches of a round, with graphs and without.
for dtype in fp32 bf16; do
  limited "$python" "$root/tests/gpu/check.py" "check_$dtype.json" --device "$device" --dtype "$dtype" --repeats 3 \
    2>"check_$dtype.log" | tail -n 1 | cut -c1-2000 || echo "check in $dtype: see check_$dtype.log and check_$dtype.json"
done
# The embedded pair: ids equal to plain generate in fp32, nothing but ties in bf16.
run tiny_fp32 "draft.device=$device" "recipe.limit=$limit" "threads=$threads"
run tiny_bf16 "draft.device=$device" "recipe.limit=$limit" "threads=$threads" target.dtype=bf16 draft.dtype=bf16
run tiny_uncaptured "draft.device=$device" "recipe.limit=$limit" "threads=$threads" graph=off
run tiny_sampled "draft.device=$device" "recipe.limit=$limit" "threads=$threads" sampling.temperature=0.7
# Prompts of one length, since transformers' static cache is compiled for each.
run bench_tiny recipe=bench "draft.device=$device" "recipe.limit=4" recipe.prompt_tokens=48 "threads=$threads"
run bench_batch recipe=bench "draft.device=$device" recipe.batch_size=8 "recipe.limit=8" "threads=$threads"
if [ "$device" != cpu ]; then
  shapes=(recipe=bench pair=shape_llama8b_1b recipe.synthetic_alpha=0.8 sampling.temperature=1 recipe.prompt_tokens=128
    sampling.max_new_tokens=96 "recipe.gammas=[2,4,8]")
  run bench_shapes "${shapes[@]}" recipe.limit=2
  run bench_shapes_batch "${shapes[@]}" recipe.limit=32 recipe.batch_size=32 recipe.repeats=2
fi

if [ -s "${SPECPLUG_SMOLLM2:-}" ] && [ -s "${SPECPLUG_SPEC_BENCH:-}" ]; then
  # bitsandbytes quantizes ordinary weights, so the GGUF file becomes some first.
  [ -d smollm2 ] || "$python" - "$SPECPLUG_SMOLLM2" smollm2 <<'PY'
import sys
from specplug.config import Dtype, Model
from specplug.models import load_target
model, tokenizer = load_target(Model(name_or_path=sys.argv[1], dtype=Dtype.bf16, device="cpu"))
model.save_pretrained(sys.argv[2])
tokenizer.save_pretrained(sys.argv[2])
PY
  common=(target=custom "target.name_or_path=$out/smollm2" target.dtype=bf16 dataset=spec_bench
    "dataset.path=$SPECPLUG_SPEC_BENCH" "recipe.limit=$limit" "sampling.max_new_tokens=$tokens" "threads=$threads")
  run nf4_copy "${common[@]}" draft=same_as_target draft/quantization=nf4
  run lookup "${common[@]}" draft=lookup
  run suffix "${common[@]}" draft=suffix
  run early_exit "${common[@]}" draft=early_exit draft.num_layers=10
  [ -z "${SPECPLUG_DRAFT:-}" ] || run distilled "${common[@]}" draft=custom "draft.name_or_path=$SPECPLUG_DRAFT" draft.dtype=bf16
  rm -rf smollm2
else
  echo "SPECPLUG_SMOLLM2 and SPECPLUG_SPEC_BENCH name no files: the embedded pair alone was run"
fi
[ "$device" = cpu ] || run bench_shapes_eager "${shapes[@]}" recipe.limit=1 recipe.repeats=1 graph=off
for kind in tiny smollm2; do # each target's runs side by side
  folders=
  for each in "$out"/*/; do
    case "$(basename "$each")" in tiny_*) of=tiny ;; *) of=smollm2 ;; esac
    [ "$of" = "$kind" ] && [ -s "$each/summary.json" ] && folders+="${each%/},"
  done
  [[ "${folders%,}" != *,* ]] \
    || "$python" -m specplug.cli recipe=compare "recipe.runs=[${folders%,}]" "hydra.run.dir=$out/compare_$kind" 2>&1 >/dev/null | tail -n 40
done
