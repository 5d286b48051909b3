#!/bin/sh
# Does Tandem do on this GPU what it does on the CPU?   tools/gpu_check.sh FOLDER   (a prepared Hugging Face model)
# Needs no network, installs nothing, and ends within 8 minutes: each check has a limit of its own and prints
# "works", "wrong" with the number, or "not there". Exit code 1 if anything is wrong.
folder=${1:?usage: tools/gpu_check.sh FOLDER, the folder of a Hugging Face model}
cd "$(dirname "$0")/.." || exit 2
export HF_HUB_OFFLINE=1 PYTHONPATH="$PWD" TOKENIZERS_PARALLELISM=false
python=${PYTHON:-python}
wrong=0

check() { # name, seconds
    timeout -k 5 "$2" "$python" -m tools.gpu_check "$1" "$folder"
    case $? in
    0) ;;
    124 | 137) echo "$1: wrong: not over within $2 s" && wrong=1 ;;
    *) wrong=1 ;;
    esac
}

check train 60
check generate 60
check bfloat16 50
check sleep 50
check tags 50
check attention 20
check colocate 80
check hybrid 70
check vllm 20
check sglang 20
exit $wrong
