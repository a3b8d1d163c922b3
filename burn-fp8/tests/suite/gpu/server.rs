//! The server of a runtime that CubeCL requires: memory, and kernels.

use std::{
    collections::HashMap,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{Arc, LazyLock, Mutex, OnceLock},
};

use burn_cubecl::cubecl::{Compiler, bytes::Bytes, future::DynFut, profile};
use burn_std::{backtrace::BackTrace, stream::StreamId};
use cubecl_common::device::{DeviceId, DeviceService, ServiceId};
use cubecl_cpp::{shared::CppCompiler, target::Cuda};
use cubecl_server::{
    allocator::{Pitch, PitchedMemoryLayoutPolicy},
    dry_run::LaunchMode,
    id::KernelId,
    kernel::CubeKernel,
    logging::ServerLogger,
    memory_management::{
        ManagedMemoryHandle, ManagedMemoryId, MemoryAllocationMode, StreamMemoryReport,
    },
    server::{
        BufferBinding, CopyDescriptor, CubeCount, KernelArguments, KernelResource, ProfileError,
        ProfilingToken, Server, ServerCommunication, ServerError, ServerStorage, ServerUtilities,
        TensorMapBinding,
    },
    storage::{BytesResource, BytesStorage, ManagedResource},
    tma::{OobFill, TensorMapFormat, TensorMapInterleave, TensorMapSwizzle},
};

use super::{Gpu, nvrtc};
use ptx_machine::{Argument, Global, Kernel, Launch, TensorMap};

/// The kernels that were launched on all GPUs: their names, with the grid, and their CUDA C++.
pub(super) static LAUNCHES: Mutex<Vec<(ServiceId, String, Arc<str>)>> = Mutex::new(Vec::new());

/// The server of one GPU.
#[derive(Debug)]
pub(super) struct Machine {
    gpu: Gpu,
    /// Whether kernels are run, and not only compiled to CUDA C++.
    runs: bool,
    global: Global,
    /// The addresses of allocations.
    buffers: HashMap<ManagedMemoryId, u64>,
    /// The first error, which every later read returns.
    failed: Option<String>,
    utilities: Arc<ServerUtilities>,
}

impl DeviceService for Machine {
    fn init(device: DeviceId) -> Self {
        let (gpu, runs) = Gpu::of(device);
        let (utilities, _) = ServerUtilities::init(
            ServiceId::of::<Self>(device),
            "cuda",
            gpu.properties(),
            Default::default(),
            Arc::new(ServerLogger::default()),
            // As in CubeCL's CUDA runtime: rows end in padding, even those of tensors with a single row.
            PitchedMemoryLayoutPolicy::new(512),
        );
        Self {
            gpu,
            runs,
            global: Global::default(),
            buffers: HashMap::new(),
            failed: None,
            utilities: Arc::new(utilities),
        }
    }

    fn utilities(&self) -> Arc<dyn std::any::Any + Send + Sync> {
        self.utilities.clone()
    }
}

impl Machine {
    fn address(&self, binding: &BufferBinding) -> u64 {
        self.buffers[&binding.memory.id()] + binding.offset_start.unwrap_or(0)
    }

    fn error(&self) -> Option<ServerError> {
        self.failed.clone().map(|reason| ServerError::Generic {
            reason,
            backtrace: BackTrace::capture(),
        })
    }

    fn run(
        &mut self,
        kernel: &dyn CubeKernel,
        count: CubeCount,
        bindings: KernelArguments,
    ) -> Result<(), String> {
        let CubeCount::Static(x, y, z) = count else {
            return Err("a grid whose size is in a buffer".into());
        };
        let compiled = compiled(kernel, self.gpu)?;
        let name = format!("{} {x}x{y}x{z}", compiled.name);
        let launch = (self.utilities.service, name, compiled.source.clone());
        LAUNCHES.lock().unwrap().push(launch);
        if !self.runs {
            return Ok(());
        }
        let mut arguments = Vec::new();
        for resource in &bindings.resources {
            arguments.push(match resource {
                KernelResource::Buffer(binding) => Argument::Pointer(self.address(binding)),
                KernelResource::TensorMap(binding) => {
                    Argument::TensorMap(self.tensor_map(binding)?)
                }
            });
        }
        // Shapes and strides are in a buffer. What precedes them, scalars and lengths, is the last parameter.
        let info = &bindings.info;
        if info.dynamic_metadata_offset < info.data.len() {
            let bytes: &[u8] = bytemuck::cast_slice(&info.data[info.dynamic_metadata_offset..]);
            let address = self.global.allocate(bytes.len());
            self.global.write(address, bytes)?;
            arguments.push(Argument::Pointer(address));
        }
        arguments.push(Argument::Bytes(bytemuck::cast_slice(&info.data)));
        let launch = Launch {
            grid: [x, y, z],
            threads: compiled.threads,
            dynamic_shared: compiled.shared_memory,
            arguments,
        };
        compiled
            .assembled(self.gpu)?
            .run(launch, &mut self.global)?;
        Ok(())
    }

    /// The arguments of `cuTensorMapEncodeTiled`, as CubeCL gives them.
    fn tensor_map(
        &self,
        TensorMapBinding { binding, map }: &TensorMapBinding,
    ) -> Result<TensorMap, String> {
        let TensorMapFormat::Tiled(tile) = &map.format else {
            return Err("a tensor map that is not tiled".into());
        };
        let plain = map.elem_ty.size() == 1
            && map.interleave == TensorMapInterleave::None
            && map.swizzle == TensorMapSwizzle::B128
            && matches!(map.oob_fill, OobFill::Zero)
            && map.elem_stride.iter().all(|stride| *stride == 1);
        let (shape, strides) = (map.metadata.shape(), map.metadata.strides());
        if !plain || shape.num_dims() != 2 || strides[1] != 1 {
            return Err(format!("another tensor map than is known here: {map:?}"));
        }
        Ok(TensorMap {
            address: self.address(binding),
            element: 1,
            sizes: vec![shape[1] as u64, shape[0] as u64],
            pitches: vec![strides[0] as u64],
            tile: vec![tile.tile_size[1] as u32, tile.tile_size[0] as u32],
            window: None,
            swizzle: 128,
        })
    }
}

/// The pitch of a tensor's rows. A tensor without gaps counts as one row.
fn pitch(descriptor: &CopyDescriptor) -> Pitch {
    let (shape, size) = (&descriptor.shape, descriptor.elem_size);
    Pitch::of(shape, &descriptor.strides, size).unwrap_or_else(|| {
        let width_bytes = shape.num_elements() * size;
        Pitch {
            width_bytes,
            height: 1,
            stride_bytes: width_bytes,
        }
    })
}

/// A kernel in CUDA C++.
struct Compiled {
    name: String,
    source: Arc<str>,
    threads: [u32; 3],
    shared_memory: usize,
    /// The kernel in PTX, once it has run.
    kernel: OnceLock<Result<Kernel, String>>,
}

/// Compiles a kernel once and keeps it, as CubeCL does.
fn compiled(kernel: &dyn CubeKernel, gpu: Gpu) -> Result<Arc<Compiled>, String> {
    type Kernels = HashMap<(KernelId, Gpu), Arc<Compiled>>;
    static KERNELS: LazyLock<Mutex<Kernels>> = LazyLock::new(Mutex::default);

    let key = (kernel.id(), gpu);
    if let Some(compiled) = KERNELS.lock().unwrap().get(&key) {
        return Ok(compiled.clone());
    }
    let definition = kernel.define();
    let settings = definition.settings.clone();
    if settings.cluster_dim.is_some() && gpu != Gpu::Hopper {
        return Err(format!("a cluster on {gpu:?}"));
    }
    let compiled = CppCompiler::<Cuda>::default().compile(definition, &gpu.options());
    let compiled = compiled.map_err(|error| error.to_string())?;
    let shared_memory = compiled.shared_memory_size;
    if shared_memory > gpu.shared_memory() {
        return Err(format!("{shared_memory} bytes of shared memory"));
    }
    let threads = settings.cube_dim;
    let compiled = Arc::new(Compiled {
        name: settings.kernel_name,
        source: compiled.source.into(),
        threads: [threads.x, threads.y, threads.z],
        shared_memory,
        kernel: OnceLock::new(),
    });
    KERNELS.lock().unwrap().insert(key, compiled.clone());
    Ok(compiled)
}

impl Compiled {
    fn assembled(&self, gpu: Gpu) -> Result<&Kernel, String> {
        let assemble = || {
            let toolkit = nvrtc::toolkit().ok_or("no NVRTC")?;
            let ptx = nvrtc::ptx(&self.source, gpu.architecture(), &toolkit)?;
            Ok(Kernel::new(&ptx))
        };
        self.kernel
            .get_or_init(assemble)
            .as_ref()
            .map_err(String::clone)
    }
}

impl ServerCommunication for Machine {}

impl Server for Machine {
    fn logger(&self) -> Arc<ServerLogger> {
        self.utilities.logger.clone()
    }

    fn utilities(&self) -> Arc<ServerUtilities> {
        self.utilities.clone()
    }

    fn initialize_memory(
        &mut self,
        memory: ManagedMemoryHandle,
        size: u64,
        _: StreamId,
    ) -> Result<(), ServerError> {
        let address = self.global.allocate(size as usize);
        self.buffers.insert(memory.binding().id(), address);
        Ok(())
    }

    fn read(
        &mut self,
        descriptors: Vec<CopyDescriptor>,
        _: StreamId,
    ) -> DynFut<Result<Vec<Bytes>, ServerError>> {
        let bytes = match self.error() {
            Some(error) => Err(error),
            None => Ok(descriptors
                .iter()
                .map(|descriptor| {
                    let (address, pitch) = (self.address(&descriptor.handle), pitch(descriptor));
                    let rows = (0..pitch.height).flat_map(|row| {
                        let start = address + (row * pitch.stride_bytes) as u64;
                        self.global.copy(start, pitch.width_bytes).unwrap()
                    });
                    Bytes::from_bytes_vec(rows.collect())
                })
                .collect()),
        };
        Box::pin(async move { bytes })
    }

    fn write(&mut self, descriptors: Vec<(CopyDescriptor, Bytes)>, _: StreamId) {
        for (descriptor, data) in descriptors {
            let (address, pitch) = (self.address(&descriptor.handle), pitch(&descriptor));
            for (row, bytes) in data.chunks(pitch.width_bytes.max(1)).enumerate() {
                // The rest of the last word too, because kernels read whole words, even if the rest is not used.
                let mut bytes = bytes.to_vec();
                bytes.resize(bytes.len().next_multiple_of(4), 0xCD);
                let start = address + (row * pitch.stride_bytes) as u64;
                self.global.write(start, &bytes).unwrap();
            }
        }
    }

    fn sync(&mut self, _: Vec<BufferBinding>, _: StreamId) -> DynFut<Result<(), ServerError>> {
        let result = self.error().map_or(Ok(()), Err);
        Box::pin(async move { result })
    }

    fn check(&mut self, _: Vec<BufferBinding>, _: StreamId) -> Result<(), ServerError> {
        self.error().map_or(Ok(()), Err)
    }

    unsafe fn launch(
        &mut self,
        kernel: Box<dyn CubeKernel>,
        count: CubeCount,
        bindings: KernelArguments,
        _: StreamId,
        _: LaunchMode,
    ) {
        if self.failed.is_some() {
            return;
        }
        let run = AssertUnwindSafe(|| self.run(&*kernel, count, bindings));
        let result = catch_unwind(run).unwrap_or_else(|_| Err("a panic: see above".into()));
        self.failed = result.err();
    }

    fn flush(&mut self, _: StreamId) -> Result<(), ServerError> {
        Ok(())
    }

    fn memory_report(&mut self, _: StreamId) -> Option<StreamMemoryReport> {
        None
    }

    fn memory_cleanup(&mut self, _: StreamId) -> Result<(), ServerError> {
        Ok(())
    }

    fn start_profile(&mut self, _: StreamId) -> Result<ProfilingToken, ServerError> {
        Ok(ProfilingToken { id: 0 })
    }

    fn end_profile(
        &mut self,
        _: StreamId,
        _: ProfilingToken,
    ) -> Result<profile::ProfileDuration, ProfileError> {
        Err(ProfileError::NotRegistered {
            backtrace: BackTrace::capture(),
        })
    }

    fn allocation_mode(&mut self, _: MemoryAllocationMode, _: StreamId) {}
}

impl ServerStorage for Machine {
    type Storage = BytesStorage;

    fn get_resource(
        &mut self,
        _: BufferBinding,
        _: StreamId,
    ) -> Result<ManagedResource<BytesResource>, ServerError> {
        panic!("memory here has no pointers")
    }
}
