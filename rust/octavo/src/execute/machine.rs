//! How much memory this process may still take.

use std::fs;
use std::path::{Path, PathBuf};

/// Bytes that can still be taken without swapping or being killed: what the machine has available, and what the control
/// groups of this process leave of their limits. `None` where the system does not say.
pub fn free_memory_bytes() -> Option<u64> {
    let machine = fs::read_to_string("/proc/meminfo").ok().and_then(|text| field_kib(&text, "MemAvailable:"));
    [machine, cgroup_v2_free(), cgroup_v1_free()].into_iter().flatten().min()
}

/// The value in bytes of a line `NAME   123 kB`.
fn field_kib(text: &str, name: &str) -> Option<u64> {
    let value = text.lines().find_map(|line| line.strip_prefix(name))?;
    value.split_whitespace().next()?.parse::<u64>().ok()?.checked_mul(1024)
}

/// The tightest limit on the way from this process's group up to the root.
fn cgroup_v2_free() -> Option<u64> {
    let groups = fs::read_to_string("/proc/self/cgroup").ok()?;
    let own = groups.lines().find_map(|line| line.strip_prefix("0::"))?;
    let root = Path::new("/sys/fs/cgroup");
    let own: PathBuf = root.join(own.trim_start_matches('/'));
    let free = own.ancestors().take_while(|group| group.starts_with(root)).filter_map(|group| {
        let limit = read_number(&group.join("memory.max"))?;
        let used = read_number(&group.join("memory.current"))?;
        // Pages of files count as used, but are given back when memory is wanted.
        let stat = fs::read_to_string(group.join("memory.stat")).unwrap_or_default();
        Some(left(limit, used, &stat, "inactive_file"))
    });
    free.min()
}

fn cgroup_v1_free() -> Option<u64> {
    let group = Path::new("/sys/fs/cgroup/memory");
    let limit = read_number(&group.join("memory.limit_in_bytes"))?;
    let used = read_number(&group.join("memory.usage_in_bytes"))?;
    let stat = fs::read_to_string(group.join("memory.stat")).unwrap_or_default();
    Some(left(limit, used, &stat, "total_inactive_file"))
}

fn left(limit: u64, used: u64, stat: &str, reclaimable: &str) -> u64 {
    let line = stat.lines().find_map(|line| line.strip_prefix(reclaimable)?.strip_prefix(' '));
    let reclaimable = line.and_then(|value| value.trim().parse().ok()).unwrap_or(0);
    limit.saturating_sub(used.saturating_sub(reclaimable))
}

/// A file that holds one number; `max` and the like are no limit.
fn read_number(path: &Path) -> Option<u64> {
    fs::read_to_string(path).ok()?.trim().parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_what_linux_writes() {
        let meminfo = "MemTotal:       32768 kB\nMemFree:         100 kB\nMemAvailable:   2048 kB\n";
        assert_eq!(field_kib(meminfo, "MemAvailable:"), Some(2 << 20));
        assert_eq!(field_kib("MemTotal: 1 kB\n", "MemAvailable:"), None);
        let stat = "anon 5\ninactive_file 300\nactive_file 7\n";
        assert_eq!(left(1000, 900, stat, "inactive_file"), 400);
        assert_eq!(left(1000, 5000, "", "inactive_file"), 0);
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn this_machine_has_memory() {
        assert!(free_memory_bytes().is_some_and(|bytes| bytes > 1 << 20));
    }
}
