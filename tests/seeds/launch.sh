MODEL_ARGS=(--hf-checkpoint "${MODEL}")
CKPT_ARGS=(--save "${OUT}" --save-interval 1 --max-actor-ckpt-to-keep 1)
ROLLOUT_ARGS=(
   --prompt-data "${DATA}" --input-key prompt --label-key answer --rollout-shuffle --rm-type match_fraction
   --num-rollout 2 --rollout-batch-size 8 --n-samples-per-prompt 4 --rollout-max-prompt-len 4
   --rollout-max-response-len 4 --rollout-temperature 0.8 --global-batch-size 32 --use-streaming-dataset
)
OPTIMIZER_ARGS=(--optimizer adam --lr 1e-3 --lr-decay-style constant --weight-decay 0.1 --adam-beta1 0.9 --adam-beta2 0.98)
GRPO_ARGS=(
   --advantage-estimator grpo --use-kl-loss --kl-loss-coef 0.01 --kl-loss-type low_var_kl --kl-coef 0.00
   --entropy-coef 0.00 --eps-clip 0.2 --eps-clip-high 0.28 --use-tis --ref-update-interval 2
)
PERF_ARGS=(--use-dynamic-batch-size --max-tokens-per-gpu 4096)
SGLANG_ARGS=(--actor_rollout_ref.rollout.strict false --sglang-mem-fraction-static 0.6)
MISC_ARGS=(--attention-dropout 0.0 --hidden-dropout 0.0 --accumulate-allreduce-grads-in-fp32)
RUNTIME_ENV_JSON='{}'

ray job submit --address="http://127.0.0.1:8265" \
--runtime-env-json="${RUNTIME_ENV_JSON}" \
-- python3 -m tandem train \
--resource '{"actor": [1, 4], "rollout": [1, 4]}' \
--max-staleness 2 \
--num-data-storage-units 1 \
--num-iters-per-train-update 8 \
--balance-data \
--hybrid \
"${MODEL_ARGS[@]}" \
"${CKPT_ARGS[@]}" \
"${ROLLOUT_ARGS[@]}" \
"${OPTIMIZER_ARGS[@]}" \
"${GRPO_ARGS[@]}" \
"${PERF_ARGS[@]}" \
"${SGLANG_ARGS[@]}" \
"${MISC_ARGS[@]}"
