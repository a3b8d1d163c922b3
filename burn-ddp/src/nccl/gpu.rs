//! A GPU of this machine, by way of the CUDA driver.

use std::sync::Arc;

use cudarc::driver::{CudaContext, CudaEvent, CudaStream, DriverError};

use super::{
    ffi::{DeviceStream, Functions, Stream, has_driver},
    found::nccl,
    link::Link,
};
use crate::{DdpError, NcclError, NcclVersion, backend::Gpu, collective::Collective};

/// The GPU with this ordinal, and the version of this machine's NCCL.
pub(crate) fn offer(ordinal: usize) -> Result<(Gpu, NcclVersion), NcclError> {
    let version = nccl()?.version;
    if !has_driver() {
        return Err(NcclError::Driver {
            problem: "CUDA's driver (libcuda.so) is not installed".into(),
        });
    }
    let driver = |error: DriverError| NcclError::Driver {
        problem: error.to_string(),
    };
    let context = CudaContext::new(ordinal).map_err(driver)?;
    let uuid = context.uuid().map_err(driver)?;
    let gpu = Gpu {
        ordinal,
        uuid: uuid.bytes.map(|byte| byte as u8),
    };
    Ok((gpu, version))
}

/// Opens this rank's link. All ranks call this, for the same `call`.
pub(crate) fn open(call: &Collective<'_>, ordinal: usize) -> Result<Link, DdpError> {
    let found = nccl().map_err(|reason| DdpError::Nccl {
        rank: call.transport.number(call.rank),
        reason,
    })?;
    let identity = || found.unique_id();
    let link = Link::open(call, ordinal, identity, || {
        let stream = GpuStream::new(ordinal).map_err(text)?;
        Ok((Functions::of(found.library())?, Box::new(stream)))
    })?;
    log::info!(
        "burn-ddp: rank {} of {} is on cuda:{ordinal}, over NCCL {}",
        call.rank,
        call.world_size,
        found.version
    );
    Ok(link)
}

fn text(error: DriverError) -> String {
    error.to_string()
}

/// A stream of a GPU, in the device's primary context, which CubeCL uses too.
struct GpuStream {
    context: Arc<CudaContext>,
    stream: Arc<CudaStream>,
    event: Option<CudaEvent>,
}

impl GpuStream {
    fn new(ordinal: usize) -> Result<Self, DriverError> {
        let context = CudaContext::new(ordinal)?;
        // `new_stream` would first wait, without a time limit, for all work of the device.
        let stream = context.default_stream().fork()?;
        Ok(Self {
            context,
            stream,
            event: None,
        })
    }
}

impl DeviceStream for GpuStream {
    fn bind(&self) -> Result<(), String> {
        self.context.bind_to_thread().map_err(text)
    }

    fn raw(&self) -> Stream {
        self.stream.cu_stream() as Stream
    }

    fn record(&mut self) -> Result<(), String> {
        self.event = Some(self.stream.record_event(None).map_err(text)?);
        Ok(())
    }

    fn is_done(&self) -> Result<bool, String> {
        let event = self.event.as_ref();
        event.map_or(Ok(true), |event| event.try_is_complete().map_err(text))
    }
}
