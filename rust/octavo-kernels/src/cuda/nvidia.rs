//! The driver of a real GPU. Its library is opened at run time, so nothing here needs it to be there before a device is
//! asked for. The one room with calls of it.

mod open; // the library, its devices, their kernels
mod pinned; // memory of the host that is copied from and to in the background

pub use open::devices;

use std::collections::HashMap;
use std::ffi::{CStr, CString, c_void};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};

use cudarc::driver::result::{self, DriverError};
use cudarc::driver::sys;

use super::driver::{Address, DeviceInfo, Driver, GraphId, HostId, Launch};
use super::image;
use crate::{BackendError, Result};
use pinned::{HALF_BYTES, HostMemory, Staging};

/// A GPU, its primary context, and one stream.
pub struct Nvidia {
    info: DeviceInfo,
    device: sys::CUdevice,
    context: sys::CUcontext,
    stream: sys::CUstream,
    modules: Vec<sys::CUmodule>,
    state: Mutex<State>,
    staging: Mutex<Option<Staging>>,
    recording: AtomicBool,
}

#[derive(Default)]
struct State {
    functions: HashMap<String, Function>,
    graphs: HashMap<GraphId, Graph>,
    hosts: HashMap<HostId, HostMemory>,
    /// The next graph or memory of the host.
    next_id: u64,
}

#[derive(Clone, Copy)]
struct Function(sys::CUfunction);

#[derive(Clone, Copy)]
struct Graph(sys::CUgraphExec);

// SAFETY: handles of the driver, which may be used from any thread.
unsafe impl Send for Function {}
// SAFETY: a handle of the driver, which may be used from any thread.
unsafe impl Send for Graph {}
// SAFETY: handles of the driver, which may be used from any thread; every call makes the context the thread's own first.
unsafe impl Send for Nvidia {}
// SAFETY: as above; what changes lies behind the mutex.
unsafe impl Sync for Nvidia {}

fn failed(what: &str) -> impl Fn(DriverError) -> BackendError + '_ {
    move |error| BackendError::Device(format!("{what}: {}", words(error)))
}

/// The driver's own name of an error, or its number, and what the driver says about it.
fn words(error: DriverError) -> String {
    let text = |found: Result<&CStr, DriverError>| found.ok().map(|text| text.to_string_lossy().into_owned());
    match (text(error.error_name()), text(error.error_string())) {
        _ if error.0 == sys::CUresult::CUDA_ERROR_STUB_LIBRARY => {
            "the libcuda that the dynamic linker finds first is one to link against, not a driver's".to_owned()
        }
        (Some(name), Some(meaning)) => format!("{name} ({meaning})"),
        _ => format!("error {} of the driver", error.0 as u32),
    }
}

impl Nvidia {
    /// Opens device number `ordinal`.
    pub fn open(ordinal: usize) -> Result<Self> {
        let (device, info, driver) = open::find(ordinal)?;
        let opened = failed("opening the device");
        // SAFETY: the device was given by the driver; what is retained is released in `drop`.
        let context = unsafe { result::primary_ctx::retain(device) }.map_err(&opened)?;
        let (stream, modules) = (std::ptr::null_mut(), Vec::new());
        let (state, staging) = (Mutex::default(), Mutex::default());
        let recording = AtomicBool::new(false);
        let mut this = Self { info, device, context, stream, modules, state, staging, recording };
        this.enter()?;
        this.staging = Mutex::new(Some(Staging::new().map_err(&opened)?));
        this.stream = result::stream::create(result::stream::StreamKind::NonBlocking).map_err(&opened)?;
        for (name, image) in image::IMAGES {
            let module = open::load(name, image, &this.info, driver)?;
            this.modules.push(module);
        }
        Ok(this)
    }

    /// Makes the context this thread's own. Costs next to nothing when it is already.
    fn enter(&self) -> Result<()> {
        // SAFETY: retained until `drop`.
        unsafe { result::ctx::set_current(self.context) }.map_err(failed("entering the device's context"))
    }

    /// The same, for what must not be part of a graph: the driver would record it, or spoil the graph.
    fn enter_outside_recording(&self, what: &str) -> Result<()> {
        if self.recording.load(Ordering::Relaxed) {
            return Err(BackendError::Device(format!("{what} while a graph is recorded")));
        }
        self.enter()
    }

    fn state(&self) -> std::sync::MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Memory of the host that has so many bytes.
    fn host(&self, host: HostId, bytes: usize) -> Result<HostMemory> {
        let memory = self.state().hosts.get(&host).copied().filter(|memory| bytes <= memory.bytes);
        memory.ok_or_else(|| BackendError::Device(format!("no memory {host} of the host with {bytes} bytes")))
    }

    fn function(&self, name: &str) -> Result<Function> {
        let mut state = self.state();
        if let Some(&function) = state.functions.get(name) {
            return Ok(function);
        }
        let c_name = CString::new(name).map_err(|_| BackendError::Device(format!("no kernel is called {name:?}")))?;
        // SAFETY: modules are unloaded in `drop`, not before.
        let in_module = |&module| unsafe { result::module::get_function(module, c_name.clone()) }.ok();
        let function = self.modules.iter().find_map(in_module);
        let function = function.ok_or_else(|| BackendError::Device(format!("there is no kernel {name}")))?;
        self.allow_all_shared_memory(function)?;
        state.functions.insert(name.to_owned(), Function(function));
        Ok(Function(function))
    }

    /// Blocks may ask for more than 48 KiB only of functions that allow it.
    fn allow_all_shared_memory(&self, function: sys::CUfunction) -> Result<()> {
        use sys::CUdevice_attribute_enum::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN as MOST;
        use sys::CUfunction_attribute_enum::{
            CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES as DYNAMIC, CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES as STATIC,
        };
        // SAFETY: device and function were given by the driver.
        let allowed = unsafe {
            result::device::get_attribute(self.device, MOST).and_then(|most| {
                let fixed = result::function::get_function_attribute(function, STATIC)?;
                result::function::set_function_attribute(function, DYNAMIC, most - fixed)
            })
        };
        allowed.map_err(failed("allowing shared memory"))
    }
}

impl State {
    fn next_id(&mut self) -> u64 {
        self.next_id += 1;
        self.next_id
    }
}

impl Driver for Nvidia {
    fn info(&self) -> &DeviceInfo {
        &self.info
    }

    fn free_bytes(&self) -> Result<u64> {
        self.enter()?;
        result::mem_get_info().map(|(free, _)| free as u64).map_err(failed("asking for free memory"))
    }

    fn take(&self, what: &'static str, bytes: usize) -> Result<Address> {
        self.enter_outside_recording("memory is taken")?;
        // SAFETY: given back by `give_back` only.
        unsafe { result::malloc_sync(bytes) }.map_err(|DriverError(error)| match error {
            sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY | sys::CUresult::CUDA_ERROR_INVALID_VALUE => {
                BackendError::OutOfMemory { what, bytes }
            }
            other => failed("taking memory")(DriverError(other)),
        })
    }

    fn give_back(&self, at: Address) {
        // Nobody is left who could do anything about an error. Freeing waits for what still uses the memory.
        if self.enter().is_ok() {
            // SAFETY: taken by `take`; its owner is being dropped.
            let _ = unsafe { result::free_sync(at) };
        }
    }

    fn fill(&self, at: Address, byte: u8, bytes: usize) -> Result<()> {
        // The driver may call nothing at all invalid.
        if bytes == 0 {
            return Ok(());
        }
        self.enter()?;
        // SAFETY: callers fill memory that they own.
        unsafe { result::memset_d8_async(at, byte, bytes, self.stream) }.map_err(failed("filling memory"))
    }

    fn upload(&self, to: Address, from: &[u8]) -> Result<()> {
        self.enter_outside_recording("an upload")?;
        let mut staging = self.staging.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(staging) = staging.as_mut() else { return Err(BackendError::Device("no pinned memory".into())) };
        for (number, piece) in from.chunks(HALF_BYTES).enumerate() {
            let to = to + (number * HALF_BYTES) as Address;
            staging.upload(to, piece, self.stream).map_err(failed("uploading"))?;
        }
        Ok(())
    }

    fn download(&self, to: &mut [u8], from: Address) -> Result<()> {
        self.enter_outside_recording("a download")?;
        // SAFETY: callers own what is read; the stream is waited for before `to` is let go.
        unsafe { result::memcpy_dtoh_async(to, from, self.stream) }.map_err(failed("downloading"))?;
        self.synchronize()
    }

    fn take_host(&self, what: &'static str, bytes: usize) -> Result<HostId> {
        self.enter_outside_recording("memory is taken")?;
        let memory = HostMemory::take(bytes).map_err(|DriverError(error)| match error {
            sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY => BackendError::OutOfMemory { what, bytes },
            other => failed("taking memory of the host")(DriverError(other)),
        })?;
        let mut state = self.state();
        let id = state.next_id();
        state.hosts.insert(id, memory);
        Ok(id)
    }

    fn give_back_host(&self, host: HostId) {
        let found = self.state().hosts.remove(&host);
        if let Some(memory) = found
            && self.synchronize().is_ok()
        {
            // SAFETY: everything has run, and it was in the map, so it has not been given back before.
            unsafe { memory.free() };
        }
    }

    fn download_later(&self, host: HostId, first: usize, from: Address, bytes: usize) -> Result<()> {
        self.enter_outside_recording("a download")?;
        let HostMemory { at, copied, .. } = self.host(host, first + bytes)?;
        // SAFETY: as many bytes are there, and nobody reads them before the event says that they have been copied. Callers
        // own what is read on the device.
        let sent = unsafe {
            let to = std::slice::from_raw_parts_mut(at.add(first), bytes);
            result::memcpy_dtoh_async(to, from, self.stream).and_then(|()| result::event::record(copied, self.stream))
        };
        sent.map_err(failed("downloading"))
    }

    fn read_host(&self, to: &mut [u8], host: HostId) -> Result<()> {
        self.enter_outside_recording("a download")?;
        let HostMemory { at, copied, .. } = self.host(host, to.len())?;
        // SAFETY: the event was made with the memory; after it nothing writes there until the next `download_later`.
        unsafe {
            result::event::synchronize(copied).map_err(failed("the device failed"))?;
            at.copy_to_nonoverlapping(to.as_mut_ptr(), to.len());
        }
        Ok(())
    }

    fn copy(&self, to: Address, from: Address, bytes: usize) -> Result<()> {
        self.enter()?;
        // SAFETY: callers own both.
        unsafe { result::memcpy_dtod_async(to, from, bytes, self.stream) }.map_err(failed("copying"))
    }

    fn launch(&self, launch: &Launch) -> Result<()> {
        self.enter()?;
        let function = self.function(&launch.kernel)?;
        let [x, y, z] = launch.grid;
        let bits = launch.arguments.iter().map(|argument| &raw const argument.bits);
        let mut arguments: Vec<*mut c_void> = bits.map(|bits| bits.cast_mut().cast()).collect();
        // SAFETY: the driver reads as many bytes of each argument as the kernel's parameter has, which the shim checks in
        // tests to be those of its kind; what kernels do to memory is checked there too.
        let launched = unsafe {
            result::launch_kernel(
                function.0,
                (x, y, z),
                (launch.threads, 1, 1),
                launch.shared_bytes,
                self.stream,
                &mut arguments,
            )
        };
        launched.map_err(|error| BackendError::Device(format!("launching {}: {}", launch.kernel, words(error))))
    }

    fn synchronize(&self) -> Result<()> {
        self.enter_outside_recording("the device is waited for")?;
        // SAFETY: the stream lives until `drop`.
        unsafe { result::stream::synchronize(self.stream) }.map_err(failed("the device failed"))
    }

    fn begin_recording(&self) -> Result<()> {
        self.enter_outside_recording("a graph is begun")?;
        // Other threads of the process may do with the driver what they like.
        let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
        // SAFETY: the stream lives until `drop`.
        unsafe { result::stream::begin_capture(self.stream, mode) }.map_err(failed("recording a graph"))?;
        self.recording.store(true, Ordering::Relaxed);
        Ok(())
    }

    fn end_recording(&self) -> Result<GraphId> {
        self.recording.store(false, Ordering::Relaxed);
        self.enter()?;
        let recorded = failed("recording a graph");
        // SAFETY: the stream lives until `drop`.
        let graph = unsafe { result::stream::end_capture(self.stream) }.map_err(&recorded)?;
        let mut instance = std::ptr::null_mut();
        // SAFETY: the graph was given by the driver two lines above, and is not used after `destroy`.
        let instantiated = unsafe {
            let instantiated = sys::cuGraphInstantiateWithFlags(&raw mut instance, graph, 0).result();
            let _ = result::graph::destroy(graph);
            instantiated
        };
        instantiated.map_err(&recorded)?;
        let mut state = self.state();
        let id = state.next_id();
        state.graphs.insert(id, Graph(instance));
        Ok(id)
    }

    fn replay(&self, graph: GraphId) -> Result<()> {
        self.enter_outside_recording("a graph is run")?;
        let found = self.state().graphs.get(&graph).copied();
        let Graph(graph) = found.ok_or_else(|| BackendError::Device(format!("no graph {graph}")))?;
        // SAFETY: graph and stream live until they are dropped.
        unsafe { result::graph::launch(graph, self.stream) }.map_err(failed("running a graph"))
    }

    fn drop_graph(&self, graph: GraphId) {
        let found = self.state().graphs.remove(&graph);
        // It may still run: what was begun ahead nobody has waited for.
        if let Some(Graph(graph)) = found
            && self.synchronize().is_ok()
        {
            // SAFETY: it was in the map, so it has not been destroyed before, and it does not run.
            let _ = unsafe { result::graph::exec_destroy(graph) };
        }
    }
}

impl Drop for Nvidia {
    fn drop(&mut self) {
        if self.enter().is_err() {
            return;
        }
        let graphs: Vec<Graph> = self.state().graphs.drain().map(|(_, graph)| graph).collect();
        let hosts: Vec<HostMemory> = self.state().hosts.drain().map(|(_, memory)| memory).collect();
        let staging = self.staging.lock().unwrap_or_else(PoisonError::into_inner).take();
        // SAFETY: everything was given by the driver, and nobody is left to use it. Errors cannot be told to anybody.
        unsafe {
            let _ = result::stream::synchronize(self.stream);
            for Graph(graph) in graphs {
                let _ = result::graph::exec_destroy(graph);
            }
            if let Some(staging) = staging {
                staging.free();
            }
            hosts.into_iter().for_each(|memory| memory.free());
            for &module in &self.modules {
                let _ = result::module::unload(module);
            }
            if !self.stream.is_null() {
                let _ = result::stream::destroy(self.stream);
            }
            // The context may end with this, and must not be left as the thread's own.
            let _ = result::ctx::set_current(std::ptr::null_mut());
            let _ = result::primary_ctx::release(self.device);
        }
    }
}
