//! Laws about the source itself, each of which somebody would otherwise break in good faith.

use std::path::{Path, PathBuf};

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").canonicalize().expect("the workspace is there")
}

/// Every file below `folder` with one of these endings, with its text.
fn sources(folder: &str, endings: &[&str]) -> Vec<(String, String)> {
    let mut found = Vec::new();
    let mut folders = vec![root().join(folder)];
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(&folder).unwrap_or_else(|error| panic!("{}: {error}", folder.display())) {
            let path = entry.expect("a readable entry").path();
            if path.is_dir() {
                if path.file_name().is_none_or(|name| name != "fixtures" && name != "__pycache__") {
                    folders.push(path);
                }
            } else if endings.iter().any(|ending| path.extension().is_some_and(|found| found == *ending)) {
                let name = path.strip_prefix(root()).expect("below the root").display().to_string();
                found.push((name, std::fs::read_to_string(&path).expect("UTF-8 text")));
            }
        }
    }
    assert!(!found.is_empty(), "nothing found in {folder}");
    found
}

/// The text before its unit tests.
fn product(text: &str) -> &str {
    text.split("#[cfg(test)]").next().unwrap_or(text)
}

fn assert_none(found: Vec<String>, law: &str) {
    assert!(found.is_empty(), "{law}:\n{}", found.join("\n"));
}

fn lines_with<'a>(files: &'a [(String, String)], words: &'a [&'a str]) -> impl Iterator<Item = String> + 'a {
    files.iter().flat_map(move |(name, text)| {
        product(text).lines().enumerate().filter_map(move |(i, line)| {
            let code = line.split("//").next().unwrap_or(line);
            words.iter().find(|word| code.contains(**word)).map(|word| format!("{name}:{}: {word}", i + 1))
        })
    })
}

#[test]
fn the_pure_rooms_are_pure() {
    let impure = [
        "Instant",
        "SystemTime",
        "std::thread",
        "Mutex",
        "RwLock",
        "Condvar",
        "mpsc",
        "std::fs",
        "std::env",
        "File::",
        "Atomic",
        "thread_local",
        "OnceLock",
        "RandomState",
    ];
    for room in ["stages", "schedule", "kv", "sample"] {
        let files = sources(&format!("rust/octavo/src/{room}"), &["rs"]);
        assert_none(lines_with(&files, &impure).collect(), "no clock, thread, lock, file or global randomness here");
    }
}

#[test]
fn dependencies_point_one_way() {
    let kernels = sources("rust/octavo-kernels/src", &["rs"]);
    assert_none(lines_with(&kernels, &["octavo::", "pyo3"]).collect(), "the kernels know nobody");
    let engine = sources("rust/octavo/src", &["rs"]);
    assert_none(lines_with(&engine, &["pyo3", "unsafe "]).collect(), "the engine knows no Python and no unsafe");
}

#[test]
fn files_hold_one_subject() {
    let mut long = Vec::new();
    for folder in ["rust", "python", "benches", "tests"] {
        for (name, text) in sources(folder, &["rs", "py"]) {
            let lines = product(&text).lines().count();
            if lines > 700 {
                long.push(format!("{name}: {lines} lines"));
            }
        }
    }
    assert_none(long, "over 700 lines there is a second subject in the file");
}

#[test]
fn nothing_is_left_for_later() {
    let engine = sources("rust", &["rs"]);
    let marks = ["todo!(", "unimplemented!(", "dbg!(", "FIXME", "XXX"];
    assert_none(lines_with(&engine, &marks).collect(), "placeholders");
    let python = sources("python", &["py"]);
    assert_none(lines_with(&python, &["NotImplementedError", "FIXME", "XXX"]).collect(), "placeholders");
}

#[test]
fn bad_input_cannot_panic_by_shortcut() {
    // `expect` states why it cannot fail; `unwrap` states nothing.
    let files: Vec<_> =
        ["rust/octavo/src", "rust/octavo-python/src"].iter().flat_map(|folder| sources(folder, &["rs"])).collect();
    assert_none(lines_with(&files, &[".unwrap()", "panic!("]).collect(), "unwrap and panic outside tests");
}
