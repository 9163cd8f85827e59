//! A step's cost: it grows with the running sequences, not with the pool or the queue.

use std::time::Instant;

use octavo::kv::KvLayout;
use octavo::schedule::SchedulerConfig;

use crate::world::{World, prompt, request};

/// Mean microseconds of schedule and commit of a decode step.
fn decode_step_us(running: usize, waiting: usize, blocks: usize) -> f64 {
    let mut world = World::unchecked(SchedulerConfig {
        max_num_seqs: running,
        max_num_batched_tokens: running * 16,
        itl_target_ns: None,
        max_queue: running + waiting,
        max_model_len: 1 << 16,
        layout: KvLayout::new(16),
        blocks,
    });
    for id in 0..(running + waiting) as u64 {
        world.submit(request(id, &prompt(id, 40), 1000));
    }
    while world.scheduler.stats().running < running || world.scheduler.stats().tokens_generated < running as u64 {
        world.step();
    }
    world.step();
    let (steps, generated) = (20, world.scheduler.stats().tokens_generated);
    let mut spent = std::time::Duration::ZERO;
    for _ in 0..steps {
        let begin = Instant::now();
        let batch = world.scheduler.schedule(world.now).expect("all decode");
        spent += begin.elapsed();
        octavo::execute::Executor::launch(&mut world.executor, &batch).expect("simulated");
        let output = octavo::execute::Executor::collect(&mut world.executor).expect("simulated");
        assert_eq!(batch.rows(), running, "one row for each running sequence");
        let begin = Instant::now();
        world.scheduler.commit(batch, output, world.now);
        spent += begin.elapsed();
        while world.scheduler.next_event().is_some() {}
    }
    let stats = world.scheduler.stats();
    assert_eq!(stats.tokens_generated - generated, (steps * running) as u64, "every running sequence, every step");
    assert_eq!((stats.running, stats.waiting, stats.preemptions), (running, waiting, 0));
    spent.as_secs_f64() * 1e6 / steps as f64
}

#[test]
fn a_large_pool_and_a_long_queue_cost_nothing() {
    for (running, waiting, blocks) in
        [(64, 0, 10_000), (1024, 0, 20_000), (1024, 0, 1_000_000), (1024, 10_000, 1_000_000)]
    {
        let us = decode_step_us(running, waiting, blocks);
        println!("{running:>5} running {waiting:>6} waiting {blocks:>8} blocks: {us:>7.1} µs a step");
    }
}
