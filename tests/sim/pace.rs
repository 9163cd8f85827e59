//! What a long prompt may cost those who are being answered while it is read.

use octavo::execute::simulated::{CostModel, Simulated};
use octavo::kv::KvLayout;
use octavo::request::RequestId;
use octavo::schedule::SchedulerConfig;

use crate::world::{VOCAB, World, prompt, request};

#[test]
fn a_long_prompt_holds_running_requests_up_no_longer_than_the_target() {
    // Whatever else is read meanwhile: a short prompt now and then, some at a time, or one in every step.
    for (every, at_once) in [(250, 1), (10, 1), (3, 1), (2, 1), (1, 1), (7, 3)] {
        long_beside_short(every, at_once);
    }
}

fn long_beside_short(every: u64, at_once: u64) {
    // A small model on a CPU: a step takes 3 ms, a row 0.4 ms and more the longer its context. A chunk of 512 rows would
    // hold everybody up for a fifth of a second.
    let target = 30_000_000;
    let mut world = World::unchecked(SchedulerConfig {
        max_num_seqs: 20,
        max_num_batched_tokens: 512,
        max_queue: 10_000,
        max_model_len: 40_000,
        layout: KvLayout::new(16),
        blocks: 6000,
        itl_target_ns: Some(target),
    });
    world.executor = Simulated::new(CostModel { step_ns: 3e6, row_ns: 0.4e6, context_ns: 100.0 }, VOCAB);
    for id in 0..16 {
        world.submit(request(id, &prompt(id, 40), 2000));
    }
    let long = world.submit(request(100, &prompt(100, 30_000), 2));
    let (mut steps, mut shorts) = (0, Vec::new());
    while world.outcome(long).end.is_none() {
        if steps % every == every / 5 && world.outcome(RequestId(0)).end.is_none() {
            shorts.extend((0..at_once).map(|i| {
                let id = 1000 + at_once * steps + i;
                world.submit(request(id, &prompt(id, 20), 1))
            }));
        }
        world.step();
        steps += 1;
        assert!(steps < 4000, "every {every}: the long one gets on");
    }
    world.finish(4000);
    // A few steps of the target's length, though thousands of tokens were before it.
    let mut waited: Vec<u64> = shorts
        .iter()
        .map(|&id| world.outcome(id).record().ttft_ns().expect("short ones overtake a long one"))
        .collect();
    waited.sort_unstable();
    let mut worst = 0;
    for id in 0..16 {
        let times = &world.outcome(RequestId(id)).record().token_ns;
        let mut gaps: Vec<u64> = times.windows(2).map(|pair| pair[1] - pair[0]).collect();
        gaps.sort_unstable();
        worst = worst.max(gaps[gaps.len() * 99 / 100]);
    }
    let (p50, last) = (waited[waited.len() / 2], waited[waited.len() - 1]);
    println!(
        "{at_once} every {every}: {steps} steps, p99 gap {worst} ns; {} short ones, {p50} to {last} ns",
        shorts.len()
    );
    // One in every step is more than half of what decoding leaves: they queue up, and still hold nobody up.
    assert!(shorts.len() >= 4 && (every == 1 || last <= 12 * target), "every {every}: a short one waited {last} ns");
    assert!(worst <= target * 108 / 100, "every {every}: a gap of {worst} ns");
}
