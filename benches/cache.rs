//! Which blocks the pool keeps, on traces of real prompts: what it finds of what could be found, beside the floor, the ideal,
//! and a bound for whoever does not know the future. Sizes are shares of a trace's distinct blocks.
//!
//! `cargo bench --bench cache [-- FILE...]`: traces in Mooncake's format; without any, its conversation trace if it is there.

mod policies;

use std::path::{Path, PathBuf};

use policies::{Prompt, Trace};

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    if !arguments.iter().any(|argument| argument == "--bench") {
        // Eight conversations that take turns, so that the tiny run has something to find.
        let turn = |i: u32| (0..=i / 8 % 25).map(|block| (i % 8) * 25 + block).collect();
        let made: Trace = (0..200).map(|i| Prompt { blocks: turn(i), answer: 100 }).collect();
        return table("made", &made, &[0.5]);
    }
    let mut files: Vec<PathBuf> =
        arguments.iter().filter(|argument| !argument.starts_with('-')).map(PathBuf::from).collect();
    if files.is_empty() {
        let beside = "../../../shared/traces/mooncake_conversation_trace.jsonl";
        files.push(Path::new(env!("CARGO_MANIFEST_DIR")).join(beside));
    }
    for file in files {
        match policies::read(&file) {
            Some(trace) => table(&file.display().to_string(), &trace, &[0.01, 0.03, 0.1, 0.15, 0.2, 0.3, 0.5]),
            None => println!("{}: there is no such trace", file.display()),
        }
    }
}

fn table(name: &str, trace: &Trace, shares: &[f64]) {
    let (accesses, distinct) = policies::sizes(trace);
    println!("\n{name}: {} requests, {accesses} full blocks, {distinct} distinct", trace.len());
    println!("{:>18}{:>12}   of Belady's:{:>10}{:>10}{:>10}", "pool", "all found", "octavo", "LRU", "bound");
    let largest = trace.iter().map(|request| request.blocks.len()).max().unwrap_or(0) + 1;
    for share in shares {
        let blocks = (distinct as f64 * share) as usize;
        if blocks < largest {
            println!("{blocks:>10} {:>5.0} %   less than the largest request", 100.0 * share);
            continue;
        }
        let (found, floor) = (policies::play(trace, blocks), policies::least_recently_used(trace, blocks));
        let ideal = policies::belady(trace, blocks) as f64;
        let percent = |hits: f64| format!("{:.1} %", 100.0 * hits / ideal);
        println!(
            "{blocks:>10} {:>5.0} %{:>12}               {:>10}{:>10}{:>10}",
            100.0 * share,
            format!("{:.1} %", 100.0 * found as f64 / accesses as f64),
            percent(found as f64),
            percent(floor as f64),
            percent(policies::bound(trace, blocks).min(ideal)),
        );
    }
}
