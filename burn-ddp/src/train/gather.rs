//! Sends the outputs of all ranks to rank 0, which alone computes metrics.

use burn::tensor::{DType, Device, Shape, Tensor, TensorData, kind::Basic};
use burn_std::Reader;
use burn_train::{
    ClassificationOutput, MultiLabelClassificationOutput, RegressionOutput, SequenceOutput,
};
use serde::{Deserialize, Serialize};

use crate::{DdpError, ProcessGroup};

/// The output of a training or validation step. It is sent to rank 0 for its metrics.
///
/// burn-train's outputs implement this. Implement it for your own like this:
///
/// ```
/// use burn::tensor::{Device, Tensor, TensorData};
/// use burn_ddp::{DdpError, GatherOutput};
///
/// struct Forecast {
///     loss: Tensor<1>,
///     values: Tensor<2>,
/// }
///
/// impl GatherOutput for Forecast {
///     fn into_parts(self) -> Result<Vec<TensorData>, DdpError> {
///         Ok(vec![self.loss.try_into_data()?, self.values.try_into_data()?])
///     }
///
///     fn from_parts(parts: Vec<TensorData>, device: &Device) -> Self {
///         let [loss, values] = parts.try_into().expect("what `into_parts` gave");
///         Self {
///             loss: Tensor::from_data(loss, device),
///             values: Tensor::from_data(values, device),
///         }
///     }
/// }
/// ```
pub trait GatherOutput: Sized {
    /// Reads the contents of the output's tensors.
    ///
    /// # Errors
    ///
    /// [`DdpError::Device`] when a tensor cannot be read.
    fn into_parts(self) -> Result<Vec<TensorData>, DdpError>;

    /// Rebuilds the output on rank 0, from the result of [`into_parts`](Self::into_parts) on another rank.
    fn from_parts(parts: Vec<TensorData>, device: &Device) -> Self;
}

impl GatherOutput for () {
    fn into_parts(self) -> Result<Vec<TensorData>, DdpError> {
        Ok(Vec::new())
    }

    fn from_parts(_parts: Vec<TensorData>, _device: &Device) -> Self {}
}

fn tensor<const D: usize, K: Basic>(data: TensorData, device: &Device) -> Tensor<D, K> {
    let dtype = data.dtype();
    Tensor::from_data(data, (device, dtype))
}

/// Implements it for outputs of burn-train that consist of a loss, an output and targets.
macro_rules! three_tensors {
    ($($output:ty)*) => {$(
        impl GatherOutput for $output {
            fn into_parts(self) -> Result<Vec<TensorData>, DdpError> {
                Ok(vec![
                    self.loss.try_into_data()?,
                    self.output.try_into_data()?,
                    self.targets.try_into_data()?,
                ])
            }

            fn from_parts(parts: Vec<TensorData>, device: &Device) -> Self {
                let [loss, output, targets] = parts.try_into().expect("three tensors");
                Self::new(
                    tensor(loss, device),
                    tensor(output, device),
                    tensor(targets, device),
                )
            }
        }
    )*};
}

three_tensors! {
    ClassificationOutput
    MultiLabelClassificationOutput
    RegressionOutput
}

impl GatherOutput for SequenceOutput {
    fn into_parts(self) -> Result<Vec<TensorData>, DdpError> {
        let mut parts = vec![
            self.loss.try_into_data()?,
            self.logits.try_into_data()?,
            self.targets.try_into_data()?,
        ];
        if let Some(predictions) = self.predictions {
            parts.push(predictions.try_into_data()?);
        }
        Ok(parts)
    }

    fn from_parts(mut parts: Vec<TensorData>, device: &Device) -> Self {
        let predictions = parts.split_off(3).pop();
        let [loss, logits, targets] = parts.try_into().expect("three tensors or four");
        Self::new(
            tensor(loss, device),
            tensor(logits, device),
            predictions.map(|data| tensor(data, device)),
            tensor(targets, device),
        )
    }
}

/// An output, the rank that it comes from, and how many items that rank has processed.
pub(super) struct Gathered<T> {
    pub(super) rank: usize,
    pub(super) output: T,
    pub(super) processed: usize,
}

/// The header that precedes the bytes of the tensors.
#[derive(Serialize, Deserialize)]
struct Header {
    processed: usize,
    tensors: Vec<(Shape, DType)>,
}

/// On rank 0, the outputs of all ranks that have one, in rank order; on the others, nothing.
pub(super) fn gather<T: GatherOutput>(
    group: &ProcessGroup,
    own: Option<(T, usize)>,
    device: &Device,
) -> Result<Vec<Gathered<T>>, DdpError> {
    if !group.is_main() {
        let message = own.map(|(output, processed)| encode(output, processed));
        let message = message.transpose()?.unwrap_or_default();
        group.send(&[message.len() as u64], 0)?;
        if !message.is_empty() {
            group.send(&message, 0)?;
        }
        return Ok(Vec::new());
    }
    let own = own.map(|(output, processed)| Gathered {
        rank: 0,
        output,
        processed,
    });
    let mut all: Vec<Gathered<T>> = own.into_iter().collect();
    for rank in 1..group.world_size() {
        let mut len = [0u64];
        group.recv(&mut len, rank)?;
        if len[0] == 0 {
            continue;
        }
        let mut message = vec![0u8; len[0] as usize];
        group.recv(&mut message, rank)?;
        let decoded = decode(&message);
        let (header, parts) = decoded
            .ok_or_else(|| group.abort(format!("what rank {rank} sent is no output of a step")))?;
        all.push(Gathered {
            rank,
            output: T::from_parts(parts, device),
            processed: header.processed,
        });
    }
    Ok(all)
}

/// Encodes the header's length, the header, and the bytes of the tensors.
fn encode<T: GatherOutput>(output: T, processed: usize) -> Result<Vec<u8>, DdpError> {
    let parts = output.into_parts()?;
    let header = Header {
        processed,
        tensors: parts
            .iter()
            .map(|data| (data.shape().clone(), data.dtype()))
            .collect(),
    };
    let header = serde_json::to_vec(&header)
        .map_err(|error| DdpError::InvalidArgument(format!("an output: {error}")))?;
    let mut message = (header.len() as u64).to_le_bytes().to_vec();
    message.extend(header);
    for data in &parts {
        message.extend_from_slice(data.bytes().read(Reader::new())?);
    }
    Ok(message)
}

fn decode(message: &[u8]) -> Option<(Header, Vec<TensorData>)> {
    let (len, rest) = message.split_first_chunk()?;
    let (header, mut rest) = rest.split_at_checked(u64::from_le_bytes(*len) as usize)?;
    let header: Header = serde_json::from_slice(header).ok()?;
    let mut parts = Vec::with_capacity(header.tensors.len());
    for (shape, dtype) in &header.tensors {
        let bytes;
        (bytes, rest) = rest.split_at_checked(shape.num_elements() * dtype.size())?;
        parts.push(TensorData::from_bytes_vec(
            bytes.to_vec(),
            shape.clone(),
            *dtype,
        ));
    }
    Some((header, parts))
}
