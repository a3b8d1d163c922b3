//! Runs work of another library on CubeCL's own stream, in order with CubeCL's kernels. `burn-cudnn` does this too.

use cubecl::{
    client::Client,
    cuda::CudaRuntime,
    device_handle::DeviceHandle,
    server::{BufferBinding, Handle, ServerError},
};
use cubecl_runtime::{dry_run, runtime::Runtime, server::ServerStorage};
use cubecl_server::stream::{ExecuteScope, ScopedOutcome, WriteScoped, failed_writing};
use cudarc::driver::sys::CUstream;

use crate::capture;

type Server = <CudaRuntime as Runtime>::Server;

/// The stream that work is enqueued on.
#[derive(Clone, Copy)]
pub struct Stream {
    /// CUDA's handle, of the thread's current device.
    pub raw: CUstream,
    /// Whether a graph records it: nothing runs before the graph does, and then again with each replay.
    pub is_recorded: bool,
}

/// Makes the device's thread call `work` after everything that was submitted before, with the addresses of `inputs` and `output`,
/// and the stream that `output` was made on. Returns before that.
///
/// `work` must enqueue on that stream only. Then the inputs are ready when its work runs, and the work is done before anyone uses
/// the output, or reuses the memory of the inputs: CubeCL orders it like a kernel of its own. While the stream records a graph,
/// the work becomes part of the graph, which keeps the memory of all buffers for as long as it lives. In a dry run `work` is not
/// called, just as no kernel runs.
///
/// An error of `work` becomes the output's: whoever reads the output gets it.
pub fn enqueue(
    client: &Client,
    inputs: Vec<Handle>,
    output: Handle,
    work: impl FnOnce(&[u64], u64, Stream) -> Result<(), String> + Send + 'static,
) {
    // As with a launch, this is decided on the calling thread. The device's thread does not know.
    if dry_run::launch_mode().is_skipped() {
        return;
    }
    let stream = output.stream;
    let inputs: Vec<BufferBinding> = inputs.into_iter().map(Handle::binding).collect();
    let output = output.binding();
    let device = DeviceHandle::<Server>::new(client.service_id().device);
    device.submit(move |server: &mut Server| {
        // Also makes the device the thread's current one.
        let mut memory = |binding: &BufferBinding| server.get_resource(binding.clone(), stream);
        let found: Result<Vec<_>, ServerError> =
            inputs.iter().chain([&output]).map(&mut memory).collect();
        let held = match found {
            Ok(held) => held,
            Err(error) => return failed_writing(server, stream, vec![output], error),
        };
        let mut addresses: Vec<u64> = held.iter().map(|held| held.resource().ptr).collect();
        let target = addresses.pop().expect("the output's is the last");
        let scope = ExecuteScope::over(server, stream, vec![output.clone()]);
        let outcome = scope.execute(|server| {
            let used = inputs.iter().chain([&output]);
            // As long as this lives, memory that was made on other streams stays with this one.
            let mut streams = server.write_streams().resolve(stream, used)?;
            let current = streams.current();
            capture::touch(&mut current.capturing, inputs.iter().chain([&output]));
            let stream = Stream {
                raw: current.sys,
                is_recorded: current.capturing.is_recording(),
            };
            work(&addresses, target, stream).map_err(|reason| ServerError::Generic {
                reason,
                backtrace: Default::default(),
            })
        });
        if let ScopedOutcome::Failed(error) = outcome {
            log::error!("work of another library failed on CubeCL's stream: {error}");
        }
    });
}
