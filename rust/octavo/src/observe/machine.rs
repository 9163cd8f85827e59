//! What this machine offers, and what an engine with default settings would use of it.

use std::thread::available_parallelism;

use octavo_kernels::cpu::Isa;
use octavo_kernels::cuda;

use crate::execute::machine::free_memory_bytes;

/// What this machine offers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Machine {
    /// Instruction sets that have kernels, the plainest first.
    pub isa_available: Vec<String>,
    /// The one that would be used; or why the one that was asked for cannot be.
    pub isa: Result<String, String>,
    /// Cores that this process may use at once: worker threads, when nothing is set.
    pub cores: usize,
    /// Bytes of memory.
    pub memory_bytes: u64,
    /// Bytes that an engine would find free: what the system has available, within this process's limits.
    pub free_memory_bytes: u64,
    /// Whether this build has kernels for NVIDIA GPUs.
    pub cuda_kernels: bool,
    /// The GPUs that NVIDIA's driver knows; or why there is no driver, with what was looked for and where.
    pub gpus: Result<Vec<Gpu>, String>,
}

/// An NVIDIA GPU.
#[derive(Clone, Debug, PartialEq, Eq)]
#[allow(missing_docs)]
pub struct Gpu {
    pub name: String,
    pub capability: (u32, u32),
    pub memory_bytes: u64,
}

/// Asks the machine.
pub fn machine() -> Machine {
    Machine {
        isa_available: Isa::available().into_iter().map(Isa::describe).collect(),
        isa: Isa::from_environment().map(Isa::describe).map_err(|error| error.to_string()),
        cores: available_parallelism().map_or(1, usize::from),
        memory_bytes: memory_bytes().unwrap_or(0),
        free_memory_bytes: free_memory_bytes().unwrap_or(0),
        cuda_kernels: cuda::has_kernels(),
        gpus: gpus(),
    }
}

fn gpus() -> Result<Vec<Gpu>, String> {
    let found = cuda::devices().map_err(|error| error.to_string())?;
    let gpu =
        |info: cuda::DeviceInfo| Gpu { name: info.name, capability: info.capability, memory_bytes: info.memory_bytes };
    Ok(found.into_iter().map(gpu).collect())
}

fn memory_bytes() -> Option<u64> {
    let text = std::fs::read_to_string("/proc/meminfo").ok()?;
    let value = text.lines().find_map(|line| line.strip_prefix("MemTotal:"))?;
    value.split_whitespace().next()?.parse::<u64>().ok()?.checked_mul(1024)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_machine_offers_something() {
        let machine = machine();
        assert!(machine.cores >= 1);
        assert!(machine.isa_available[0].starts_with("portable"));
        #[cfg(target_os = "linux")]
        assert!(machine.memory_bytes > 1 << 24);
    }
}
