//! The scheduler under a steady load, on one thread (see `steady`). Time of a step: plan and commit; a model's own time is
//! not in it. Floor: the batch's arrays are touched once. Then the same as counts of instructions, which no neighbour on
//! the machine changes: they grow with the sequences that run, and not with the pool or the queue.

mod instructions;
mod steady;
mod support;

use steady::{BLOCK_SIZE, Load, World};
use support::{Bench, Work};

fn main() {
    let bench = Bench::start("schedule", Some(1));
    let (prompt, answer) = (256, 128);
    let enough = |running| Load::enough_blocks(running, prompt, answer);
    for (running, waiting, shared, blocks) in [
        (1, 0, 0, enough(1)),
        (64, 0, 0, enough(64)),
        (64, 10_000, 0, enough(64)),
        (64, 0, prompt / 2, enough(64)),
        (1024, 0, 0, enough(1024)),
        (1024, 10_000, 0, 1_000_000),
    ] {
        let (running, waiting, blocks) =
            (bench.size(running, 2), bench.size(waiting, 3), bench.size(blocks, enough(2)));
        let mut world = World::new(Load { running, waiting, blocks, prompt, shared, answer });
        world.check();
        let row_bytes = 3 * size_of::<u32>() + size_of::<octavo_kernels::Segment>();
        let table_bytes = (prompt + answer / 2) / BLOCK_SIZE * size_of::<u32>();
        let shape = format!("{running} run, {waiting} wait, {shared} shared, {blocks} blocks");
        bench.line("step", &shape, Work::cache(running * (row_bytes + table_bytes)), || world.step(|| ()));
    }
    if bench.chooses("instructions") {
        count(&bench);
    }
}

/// The table of counts. A 64th of those who run ends and is replaced in every step.
fn count(bench: &Bench) {
    println!("\n{:>8}{:>8}{:>10}{:>22}{:>24}", "run", "wait", "blocks", "instructions a step", "a running sequence");
    for running in [64, 256, 1024] {
        for waiting in [0, 10_000] {
            for blocks in [10_000, 1_000_000] {
                let (running, waiting) = (bench.size(running, 16), bench.size(waiting, 3));
                let load =
                    Load { running, waiting, blocks: bench.size(blocks, 1000), prompt: 32, shared: 0, answer: 64 };
                let mut world = World::new(load);
                world.check();
                let steps = bench.size(256usize.div_ceil(running), 1);
                let counted = instructions::count(|mark| (0..steps).for_each(|_| world.step(|| mark.toggle())));
                let Some(counted) = counted else {
                    println!("  instructions are not counted here: that takes Linux, x86-64 or AArch64, and ptrace");
                    return;
                };
                let step = counted as f64 / steps as f64;
                println!("{running:>8}{waiting:>8}{:>10}{step:>22.0}{:>24.0}", load.blocks, step / running as f64);
                if bench.is_tiny() {
                    return;
                }
            }
        }
    }
}
