//! The driver's calls on the CPU, for tests without a GPU. Device memory is host memory that nobody but kernels and copies
//! may touch; fresh memory is poisoned; every access of a kernel is checked against the allocation that its pointer came
//! from (see `cu/shim`).

use std::alloc::{Layout, alloc, dealloc};
use std::collections::{BTreeMap, HashMap, HashSet};
use std::ffi::{CStr, CString, c_char, c_int};
use std::sync::{Mutex, MutexGuard, PoisonError};

use super::driver::{Address, ArgumentKind, DeviceInfo, Driver, GraphId, HostId, Launch, taken_bytes};
use crate::{BackendError, Result};

/// What the pretended device has. Enough for small models, and little enough that a cache that fills it is soon made.
const MEMORY_BYTES: u64 = 1 << 30;
/// What fresh memory holds: not a number in any float type, and far outside anything as an index.
const POISON: u8 = 0xff;
const ALIGNMENT: usize = 256;

/// A device that is not one.
pub struct Shim {
    info: DeviceInfo,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    /// Bytes of every allocation, by where it begins.
    taken: BTreeMap<Address, usize>,
    taken_bytes: u64,
    kernels: HashMap<String, Kernel>,
    /// Launches so far: in which order a launch goes through its threads hangs on its number.
    launches: usize,
    recording: Option<Vec<Work>>,
    /// What was done while something was recorded, and spoils it.
    spoiled: Option<&'static str>,
    /// Kernels that have been launched, so that a driver has loaded them: it may not be able to while it records.
    loaded: HashSet<String>,
    graphs: HashMap<GraphId, Vec<Work>>,
    hosts: HashMap<HostId, Vec<u8>>,
    /// The next graph or memory of the host.
    next_id: u64,
}

/// Something that can be recorded.
#[derive(Clone)]
enum Work {
    Launch(Launch),
    Fill(Address, u8, usize),
    Copy(Address, Address, usize),
}

/// A kernel in the list that the C++ side keeps.
#[derive(Clone, Copy)]
struct Kernel(*const KernelOfShim);

// SAFETY: it points to a static that is never written after the program has started.
unsafe impl Send for Kernel {}

#[repr(C)]
struct KernelOfShim {
    _opaque: [u8; 0],
}

#[repr(C)]
struct Dim3(u32, u32, u32);

/// `shim::Argument`.
#[repr(C)]
struct ArgumentOfShim {
    bits: u64,
    kind: u32,
    unused: u32,
    begin: u64,
    end: u64,
}

// SAFETY: the signatures are those of `cu/shim/shim.cpp`, which the build compiles and links.
unsafe extern "C" {
    fn octavo_shim_kernel(name: *const c_char) -> *const KernelOfShim;
    fn octavo_shim_launch(
        kernel: *const KernelOfShim,
        grid: Dim3,
        threads: Dim3,
        shared_bytes: usize,
        arguments: *const ArgumentOfShim,
        count: usize,
        number: usize,
        message: *mut c_char,
        message_bytes: usize,
    ) -> c_int;
}

impl Shim {
    /// A device with so much memory and nothing on it.
    pub fn new(memory_bytes: u64) -> Self {
        let info =
            DeviceInfo { name: "the CPU, pretending".to_owned(), capability: (8, 0), processors: 1, memory_bytes };
        Self { info, state: Mutex::default() }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Default for Shim {
    fn default() -> Self {
        Self::new(MEMORY_BYTES)
    }
}

fn failed(what: String) -> BackendError {
    BackendError::Device(what)
}

impl State {
    fn next_id(&mut self) -> u64 {
        self.next_id += 1;
        self.next_id
    }

    /// The allocation that `at` lies in, or at the end of: its first byte and the one after its last.
    fn allocation(&self, at: Address) -> Option<(u64, u64)> {
        let (&begin, &bytes) = self.taken.range(..=at).next_back()?;
        let end = begin + bytes as u64;
        (at <= end).then_some((begin, end))
    }

    /// `bytes` from `at` on, all of one allocation.
    fn check(&self, what: &str, at: Address, bytes: usize) -> Result<*mut u8> {
        match self.allocation(at) {
            Some((_, end)) if bytes as u64 <= end - at => Ok(at as *mut u8),
            Some((begin, end)) => Err(failed(format!(
                "{what} of {bytes} bytes at byte {} of an allocation of {}",
                at - begin,
                end - begin
            ))),
            None => Err(failed(format!("{what} at {at:#x}, which is no allocation"))),
        }
    }

    fn outside_recording(&self, what: &str) -> Result<()> {
        match self.recording {
            None => Ok(()),
            Some(_) => Err(failed(format!("{what} while a graph is recorded"))),
        }
    }

    /// Records `work`, or does it.
    fn take_on(&mut self, work: Work) -> Result<()> {
        match (&mut self.recording, &work) {
            (Some(_), Work::Launch(Launch { kernel, .. })) if !self.loaded.contains(kernel) => {
                return Err(failed(format!(
                    "kernel {kernel} is launched for the first time while a graph is recorded"
                )));
            }
            (Some(recorded), _) => recorded.push(work),
            (None, _) => self.run(&work)?,
        }
        Ok(())
    }

    fn run(&mut self, work: &Work) -> Result<()> {
        match *work {
            Work::Launch(ref launch) => self.launch(launch)?,
            Work::Fill(at, byte, bytes) => {
                let at = self.check("a fill", at, bytes)?;
                // SAFETY: `check` found that many bytes of one allocation there.
                unsafe { at.write_bytes(byte, bytes) };
            }
            Work::Copy(to, from, bytes) => {
                let (to, from) = (self.check("a copy", to, bytes)?, self.check("a copy", from, bytes)?);
                // SAFETY: `check` found that many bytes at both; `copy` allows them to overlap.
                unsafe { to.copy_from(from, bytes) };
            }
        }
        Ok(())
    }

    fn kernel(&mut self, name: &str) -> Result<Kernel> {
        if let Some(&kernel) = self.kernels.get(name) {
            return Ok(kernel);
        }
        let c_name = CString::new(name).map_err(|_| failed(format!("{name:?} cannot be a kernel's name")))?;
        // SAFETY: a C string that outlives the call.
        let kernel = Kernel(unsafe { octavo_shim_kernel(c_name.as_ptr()) });
        if kernel.0.is_null() {
            return Err(failed(format!("there is no kernel {name}")));
        }
        self.kernels.insert(name.to_owned(), kernel);
        Ok(kernel)
    }

    fn launch(&mut self, launch: &Launch) -> Result<()> {
        let kernel = self.kernel(&launch.kernel)?;
        let mut arguments = Vec::with_capacity(launch.arguments.len());
        for (i, argument) in launch.arguments.iter().enumerate() {
            let (begin, end) = match (argument.kind, argument.bits) {
                (ArgumentKind::Pointer, at) if at != 0 => self.allocation(at).ok_or_else(|| {
                    failed(format!("kernel {}: argument {i} points to {at:#x}, which is no allocation", launch.kernel))
                })?,
                _ => (0, 0),
            };
            let (bits, kind) = (argument.bits, argument.kind as u32);
            arguments.push(ArgumentOfShim { bits, kind, unused: 0, begin, end });
        }
        let [x, y, z] = launch.grid;
        if !self.loaded.contains(&launch.kernel) {
            self.loaded.insert(launch.kernel.clone());
        }
        self.launches += 1;
        let mut message = [0u8; 512];
        // SAFETY: the kernel comes from the list, the arguments and the message outlive the call. What the kernel does to
        // memory is checked against the bounds of allocations, all of which are held by `self.taken`.
        let result = unsafe {
            octavo_shim_launch(
                kernel.0,
                Dim3(x, y, z),
                Dim3(launch.threads, 1, 1),
                launch.shared_bytes as usize,
                arguments.as_ptr(),
                arguments.len(),
                self.launches,
                message.as_mut_ptr().cast(),
                message.len(),
            )
        };
        match result {
            0 => Ok(()),
            _ => Err(failed(match CStr::from_bytes_until_nul(&message) {
                Ok(message) => message.to_string_lossy().into_owned(),
                Err(_) => format!("kernel {} failed", launch.kernel),
            })),
        }
    }
}

impl Driver for Shim {
    fn info(&self) -> &DeviceInfo {
        &self.info
    }

    fn free_bytes(&self) -> Result<u64> {
        Ok(self.info.memory_bytes - self.state().taken_bytes)
    }

    fn take(&self, what: &'static str, bytes: usize) -> Result<Address> {
        let mut state = self.state();
        state.outside_recording("memory is taken")?;
        let refused = BackendError::OutOfMemory { what, bytes };
        if bytes == 0 || taken_bytes(bytes as u64) > self.info.memory_bytes - state.taken_bytes {
            return Err(refused);
        }
        let Ok(layout) = Layout::from_size_align(bytes, ALIGNMENT) else { return Err(refused) };
        // SAFETY: the layout is of at least one byte.
        let at = unsafe { alloc(layout) };
        if at.is_null() {
            return Err(refused);
        }
        // SAFETY: as many bytes as were just taken.
        unsafe { at.write_bytes(POISON, bytes) };
        state.taken.insert(at as Address, bytes);
        state.taken_bytes += taken_bytes(bytes as u64);
        Ok(at as Address)
    }

    fn give_back(&self, at: Address) {
        let mut state = self.state();
        let Some(bytes) = state.taken.remove(&at) else { return };
        if state.recording.is_some() {
            state.spoiled = Some("memory is given back");
        }
        state.taken_bytes -= taken_bytes(bytes as u64);
        let layout = Layout::from_size_align(bytes, ALIGNMENT).expect("it was taken with this layout");
        // SAFETY: taken with this layout, and given back once: it was still in the map.
        unsafe { dealloc(at as *mut u8, layout) };
    }

    fn fill(&self, at: Address, byte: u8, bytes: usize) -> Result<()> {
        self.state().take_on(Work::Fill(at, byte, bytes))
    }

    fn upload(&self, to: Address, from: &[u8]) -> Result<()> {
        let state = self.state();
        state.outside_recording("an upload")?;
        let to = state.check("an upload", to, from.len())?;
        // SAFETY: `check` found that many bytes; a slice of the host's never lies in them.
        unsafe { to.copy_from_nonoverlapping(from.as_ptr(), from.len()) };
        Ok(())
    }

    fn download(&self, to: &mut [u8], from: Address) -> Result<()> {
        let state = self.state();
        state.outside_recording("a download")?;
        let from = state.check("a download", from, to.len())?;
        // SAFETY: `check` found that many bytes; a slice of the host's never lies in them.
        unsafe { to.as_mut_ptr().copy_from_nonoverlapping(from, to.len()) };
        Ok(())
    }

    fn take_host(&self, _what: &'static str, bytes: usize) -> Result<HostId> {
        let mut state = self.state();
        state.outside_recording("memory is taken")?;
        let host = state.next_id();
        state.hosts.insert(host, vec![POISON; bytes]);
        Ok(host)
    }

    fn give_back_host(&self, host: HostId) {
        self.state().hosts.remove(&host);
    }

    fn download_later(&self, host: HostId, first: usize, from: Address, bytes: usize) -> Result<()> {
        let mut state = self.state();
        state.outside_recording("a download")?;
        let from = state.check("a download", from, bytes)?;
        let memory = state.hosts.get_mut(&host).and_then(|memory| memory.get_mut(first..first + bytes));
        let to = memory.ok_or_else(|| failed(format!("no memory {host} of the host with {first} + {bytes} bytes")))?;
        // SAFETY: `check` found that many bytes; a slice of the host's never lies in them.
        unsafe { to.as_mut_ptr().copy_from_nonoverlapping(from, bytes) };
        Ok(())
    }

    fn read_host(&self, to: &mut [u8], host: HostId) -> Result<()> {
        let state = self.state();
        state.outside_recording("a download")?;
        let memory = state.hosts.get(&host).and_then(|memory| memory.get(..to.len()));
        to.copy_from_slice(memory.ok_or_else(|| failed(format!("no memory {host} of the host")))?);
        Ok(())
    }

    fn copy(&self, to: Address, from: Address, bytes: usize) -> Result<()> {
        self.state().take_on(Work::Copy(to, from, bytes))
    }

    fn launch(&self, launch: &Launch) -> Result<()> {
        self.state().take_on(Work::Launch(launch.clone()))
    }

    fn synchronize(&self) -> Result<()> {
        self.state().outside_recording("the device is waited for")
    }

    fn begin_recording(&self) -> Result<()> {
        let mut state = self.state();
        state.outside_recording("a graph is begun")?;
        state.recording = Some(Vec::new());
        Ok(())
    }

    fn end_recording(&self) -> Result<GraphId> {
        let mut state = self.state();
        let recorded = state.recording.take().ok_or_else(|| failed("no graph is being recorded".to_owned()))?;
        if let Some(what) = state.spoiled.take() {
            return Err(failed(format!("{what} while a graph is recorded")));
        }
        let graph = state.next_id();
        state.graphs.insert(graph, recorded);
        Ok(graph)
    }

    fn replay(&self, graph: GraphId) -> Result<()> {
        let mut state = self.state();
        state.outside_recording("a graph is run")?;
        let Some(work) = state.graphs.get(&graph).cloned() else { return Err(failed(format!("no graph {graph}"))) };
        work.iter().try_for_each(|work| state.run(work))
    }

    fn drop_graph(&self, graph: GraphId) {
        self.state().graphs.remove(&graph);
    }
}
