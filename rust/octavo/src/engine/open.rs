//! From a path to a running engine. The model is loaded on the thread that will run it, so that whatever belongs to a
//! thread (its core, its memory) belongs to the right one; the caller's thread is told of the progress.

use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::Duration;

use octavo_kernels::cpu::{CpuBackend, CpuConfig, Isa};
use octavo_kernels::cuda::{self, CudaBackend};
use octavo_kernels::reference::{Activations, ReferenceBackend};
use octavo_kernels::{Backend, BackendError, CacheDtype, DType};

use super::config::{Device, EngineConfig};
use super::handle::{Engine, Facts};
use super::mailbox::Touched;
use super::origin::Origin;
use super::outlet::Outlets;
use super::run::Runner;
use super::shared::{Message, Shared, StepTime};
use crate::error::LoadError;
use crate::execute::Executor;
use crate::execute::local::LocalExecutor;
use crate::execute::machine::free_memory_bytes;
use crate::execute::memory::{DeviceBytes, MemoryPlan, MemoryRequest};
use crate::execute::rehearsal::{device_bytes, step_limits};
use crate::grammar::Grammars;
use crate::load::{ModelFiles, WeightDtype};
use crate::model::weights::{self, MatrixBytes};
use crate::model::{Decoder, Model, Weights};
use crate::observe::readers::Readers;
use crate::schedule::{Scheduler, SchedulerConfig, Unseen};
use crate::stages::tokenize::{ChatTemplate, Tokenizer};

/// Opens the model at `path` and starts its engine. `progress` is told bytes done and bytes in all, on this thread;
/// `false` ends the load.
pub fn open(
    path: &Path,
    config: EngineConfig,
    progress: &mut dyn FnMut(u64, u64) -> bool,
) -> Result<Engine, LoadError> {
    config.validate().map_err(LoadError::Setting)?;
    let (inbox, messages) = channel();
    let (news, told) = channel();
    let shared = Arc::new(Shared::new());
    let loader = Loader { config: config.clone(), shared: shared.clone(), news };
    let from = path.to_owned();
    let cannot_start = |source| LoadError::Setting(format!("the engine's thread cannot be started: {source}"));
    let thread = std::thread::Builder::new()
        .name("octavo-engine".to_owned())
        .spawn(move || loader.load_and_run(&from, messages))
        .map_err(cannot_start)?;
    let loaded = listen(&told, &shared, progress);
    match loaded {
        Ok(loaded) => Ok(Engine {
            most_prompt_bytes: most_prompt_bytes(&loaded.tokenizer, loaded.limits.max_model_len),
            shared,
            inbox,
            thread: Mutex::new(Some(thread)),
            next_id: AtomicU64::new(0),
            limits: loaded.limits,
            path: path.to_owned(),
            origin: Arc::new(Origin {
                // Where it is found from another working directory too.
                path: std::path::absolute(path).unwrap_or_else(|_| path.to_owned()),
                architecture: loaded.facts.architecture.clone(),
                device: config.device,
                run_as: loaded.run_as,
                kv_cache_dtype: loaded.kv_cache_dtype,
                identity: OnceLock::new(),
            }),
            config,
            grammars: Grammars::new(loaded.tokenizer.clone(), loaded.facts.vocab, loaded.end_token_ids.clone()),
            facts: loaded.facts,
            tokenizer: loaded.tokenizer,
            template: loaded.template,
            end_token_ids: loaded.end_token_ids,
        }),
        Err(error) => {
            // A model that was loaded all the same ends with its inbox.
            drop(inbox);
            // What it had taken is freed when it ends, and is free when the caller hears of the error.
            let _ = thread.join();
            Err(error)
        }
    }
}

/// How fast a step reads weights that was not measured: about what machines do that models are run on.
const CPU_BYTES_PER_NS: f64 = 20.0;
/// See [`CPU_BYTES_PER_NS`].
const GPU_BYTES_PER_NS: f64 = 1000.0;

/// How long the caller goes without being asked whether to go on.
const PATIENCE: Duration = Duration::from_millis(50);

/// As many tokens as a sequence may have, each the longest there is. A normaliser may shorten a text before it is cut into
/// tokens (composing letters, for one), so four times that.
fn most_prompt_bytes(tokenizer: &Tokenizer, max_model_len: usize) -> usize {
    let longest = (0..tokenizer.len() as u32).filter_map(|id| tokenizer.piece(id)).map(<[u8]>::len).max();
    longest.unwrap_or(1).max(4).saturating_mul(max_model_len).saturating_mul(4)
}

/// What the loading thread has to say.
pub(super) enum News {
    Progress(u64, u64),
    Loaded(Box<Loaded>),
    Failed(LoadError),
}

/// What the door needs of a loaded model.
pub(super) struct Loaded {
    pub limits: SchedulerConfig,
    pub facts: Facts,
    /// As it was set, or chosen.
    kv_cache_dtype: CacheDtype,
    run_as: Vec<DType>,
    pub tokenizer: Arc<Tokenizer>,
    template: Option<ChatTemplate>,
    pub end_token_ids: Arc<[u32]>,
}

fn listen(
    news: &Receiver<News>,
    shared: &Shared,
    progress: &mut dyn FnMut(u64, u64) -> bool,
) -> Result<Box<Loaded>, LoadError> {
    let mut known = None;
    loop {
        match news.recv_timeout(PATIENCE) {
            Ok(News::Progress(done, total)) => known = Some((done, total)),
            Ok(News::Loaded(_)) if shared.closing.load(Ordering::Acquire) => return Err(LoadError::Interrupted),
            Ok(News::Loaded(loaded)) => return Ok(loaded),
            Ok(News::Failed(error)) => return Err(error),
            Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) => {
                return Err(LoadError::Setting("the engine's thread stopped on an internal error".to_owned()));
            }
        }
        // Also when there is nothing new: it is how the caller gets to end a load that is busy elsewhere.
        if let Some((done, total)) = known
            && !progress(done, total)
        {
            shared.closing.store(true, Ordering::Release);
        }
    }
}

/// The engine's thread before it has a model.
pub(super) struct Loader {
    pub config: EngineConfig,
    pub shared: Arc<Shared>,
    pub news: Sender<News>,
}

impl Loader {
    fn load_and_run(self, path: &Path, inbox: Receiver<Message>) {
        match self.load(path) {
            Ok((loaded, scheduler, executor)) => {
                let Self { shared, news, .. } = self;
                // Whoever may call can be told what to expect.
                shared.publish(scheduler.load(), Unseen::default());
                // Fails only if the opening thread is gone; then its end of the inbox is too, and the loop ends at once.
                let _ = news.send(News::Loaded(Box::new(loaded)));
                drop(news);
                Runner {
                    scheduler,
                    executor,
                    inbox,
                    shared,
                    outlets: Outlets::default(),
                    touched: Touched::default(),
                    seen: Unseen::default(),
                    more: false,
                    time: StepTime::default(),
                    recorder: None,
                    readers: Readers::default(),
                }
                .run();
            }
            Err(error) => {
                let _ = self.news.send(News::Failed(error));
            }
        }
    }

    pub fn load(&self, path: &Path) -> Result<(Loaded, Scheduler, Box<dyn Executor>), LoadError> {
        let files = ModelFiles::open(path)?.run_as(self.config.dtype);
        let model = Model::of(&files)?;
        let matrices = weights::check(&files, &model)?;
        let _ = self.news.send(News::Progress(0, matrices.stored));
        let gpu = self.gpu().map_err(|source| LoadError::Backend { path: path.to_owned(), source })?;
        let plan = self.plan_memory(path, &model, &matrices, gpu.as_ref())?;
        let limits = SchedulerConfig {
            max_num_seqs: self.config.max_num_seqs,
            max_num_batched_tokens: self.config.batched_tokens(),
            max_queue: self.config.max_queue,
            max_model_len: plan.max_model_len,
            layout: plan.layout(),
            blocks: plan.cache.blocks,
            itl_target_ns: self.config.itl_target_ms.map(|ms| (ms * 1e6) as u64),
        };
        let mut scheduler = Scheduler::new(limits.clone()).map_err(LoadError::Setting)?;
        let (tokenizer, template) = text_of(&files)?;
        let end_token_ids = files.end_token_ids(&tokenizer)?.into();
        let bytes_per_ns = if gpu.is_some() { GPU_BYTES_PER_NS } else { CPU_BYTES_PER_NS };
        let (executor, device, weights_bytes) = self.executor(path, &files, &model, &plan, &limits, gpu)?;
        scheduler.guess_step_ns(weights_bytes as f64 / bytes_per_ns);
        let facts = Facts {
            architecture: model.architecture.clone(),
            device,
            vocab: model.spec.vocab_size,
            weights_bytes,
            kv_cache_bytes: plan.cache.bytes() as u64,
            block_bytes: plan.cache.block_bytes() as u64,
            block_size: plan.cache.block_size,
            blocks: plan.cache.blocks,
            max_model_len: plan.max_model_len,
            max_num_seqs: limits.max_num_seqs,
            max_num_batched_tokens: limits.max_num_batched_tokens,
            memory: memory_text(&plan, &matrices),
            notices: notices(self.config.dtype, &matrices),
        };
        let (kv_cache_dtype, tokenizer) = (plan.cache.dtype, Arc::new(tokenizer));
        let run_as = matrices.run_as;
        Ok((Loaded { limits, facts, kv_cache_dtype, run_as, tokenizer, template, end_token_ids }, scheduler, executor))
    }

    /// The device that weights and cache go to, where that is not this machine's own memory.
    fn gpu(&self) -> Result<Option<cuda::Device>, BackendError> {
        match self.config.device {
            Device::Cpu | Device::Reference => Ok(None),
            Device::Cuda(ordinal) => cuda::Device::gpu(ordinal).map(Some),
            Device::CudaShim => cuda::Device::shim().map(Some),
        }
    }

    fn plan_memory(
        &self,
        path: &Path,
        model: &Model,
        matrices: &MatrixBytes,
        gpu: Option<&cuda::Device>,
    ) -> Result<MemoryPlan, LoadError> {
        let dtype = match self.config.device {
            Device::Reference => CacheDtype::F32,
            // A setting that this CPU cannot honour is refused when the backend is opened.
            Device::Cpu => matrices.cache_dtype(Isa::from_environment().map_or(CacheDtype::F16, Isa::half_cache)),
            Device::Cuda(_) | Device::CudaShim => matrices.gpu_cache_dtype(),
        };
        let (free_bytes, weights_bytes) = match gpu {
            None => (free_memory_bytes(), matrices.packed),
            // Nothing is packed for it.
            Some(device) => (device.driver().free_bytes().ok(), matrices.as_run),
        };
        let kv_cache_dtype = self.config.kv_cache_dtype.unwrap_or(dtype);
        let cache = (self.config.block_size, kv_cache_dtype);
        let device_bytes = |rows, seqs, longest| device_bytes(&model.spec, (rows, seqs), cache, longest);
        if gpu.is_some() {
            // What the device has no kernel for is no matter of its size.
            let refused = |source| LoadError::Backend { path: path.to_owned(), source };
            device_bytes(1, 1, self.config.block_size).map_err(refused)?;
        }
        let device_bytes = |rows, seqs, longest| device_bytes(rows, seqs, longest).unwrap_or(u64::MAX);
        let request = MemoryRequest {
            free_bytes,
            weights_bytes,
            max_num_batched_tokens: self.config.batched_tokens(),
            max_num_seqs: self.config.max_num_seqs,
            max_model_len: self.config.max_model_len,
            block_size: self.config.block_size,
            kv_cache_dtype,
            kv_cache_bytes: self.config.kv_cache_bytes,
            device_bytes: gpu.map(|_| &device_bytes as DeviceBytes<'_>),
        };
        MemoryPlan::new(&model.spec, &request)
    }

    /// The model on its device; what the device calls itself; bytes of packed weights.
    fn executor(
        &self,
        path: &Path,
        files: &ModelFiles,
        model: &Model,
        plan: &MemoryPlan,
        limits: &SchedulerConfig,
        gpu: Option<cuda::Device>,
    ) -> Result<(Box<dyn Executor>, String, u64), LoadError> {
        let SchedulerConfig { max_num_batched_tokens, max_num_seqs, ref layout, max_model_len, .. } = *limits;
        let step = step_limits(max_num_batched_tokens, max_num_seqs, layout, max_model_len);
        let refused = |source| LoadError::Backend { path: path.to_owned(), source };
        match (self.config.device, gpu) {
            (_, Some(device)) => self.on(path, CudaBackend::open(device, step).map_err(refused)?, files, model, plan),
            (Device::Reference, None) => {
                self.on(path, ReferenceBackend::new(step, Activations::F32), files, model, plan)
            }
            (_, None) => {
                let config = CpuConfig { threads: self.config.threads, isa: None, pin_caller: true };
                self.on(path, CpuBackend::open(config, step).map_err(refused)?, files, model, plan)
            }
        }
    }

    fn on<B: Backend>(
        &self,
        path: &Path,
        mut backend: B,
        files: &ModelFiles,
        model: &Model,
        plan: &MemoryPlan,
    ) -> Result<(Box<dyn Executor>, String, u64), LoadError> {
        let device = backend.describe();
        let mut progress = |done, total| {
            let _ = self.news.send(News::Progress(done, total));
            !self.shared.closing.load(Ordering::Acquire)
        };
        let weights = Weights::load(files, model, &mut backend, &mut progress)?;
        let weights_bytes = weights.matrix_bytes;
        let spec = model.spec.clone().up_to(plan.max_model_len);
        let decoder = Decoder::new(backend, spec, weights, &plan.groups, plan.cache, self.config.batched_tokens())
            .map_err(|source| LoadError::Backend { path: path.to_owned(), source })?;
        Ok((Box::new(LocalExecutor::new(decoder)), device, weights_bytes))
    }
}

/// The plan, and what became of the weights.
fn memory_text(plan: &MemoryPlan, matrices: &MatrixBytes) -> String {
    let converted = matrices.converted.iter().map(|converted| format!("\nconverted  {converted}"));
    plan.to_string() + &converted.collect::<String>()
}

/// What a user should know who did not ask for a type. The values are the same ones, so it is about memory.
fn notices(dtype: WeightDtype, matrices: &MatrixBytes) -> Vec<String> {
    let unasked = matrices.converted.iter().filter(|_| dtype == WeightDtype::Auto);
    unasked.map(|converted| format!("weights are converted at load, to types that have kernels: {converted}")).collect()
}

/// The model's tokenizer and its chat template, if it has one.
fn text_of(files: &ModelFiles) -> Result<(Tokenizer, Option<ChatTemplate>), LoadError> {
    let tokenizer = files.tokenizer()?;
    let template = match files.chat_template()? {
        None => None,
        Some(source) => {
            let template = ChatTemplate::of(&tokenizer, &source);
            Some(template.map_err(|error| files.malformed(error.to_string()))?)
        }
    };
    Ok((tokenizer, template))
}
