//! Reading several tensors at once.

use crate::{Layered, on_stream::on_this_stream};
use burn_backend::{
    ExecutionError,
    ops::{TransactionOps, TransactionPrimitive, TransactionPrimitiveData},
};
use burn_ir::BackendIr;
use core::future::Future;

impl<B: BackendIr> TransactionOps<Self> for Layered<B> {
    fn tr_execute(
        transaction: TransactionPrimitive<Self>,
    ) -> impl Future<Output = Result<TransactionPrimitiveData, ExecutionError>> + Send {
        fn storage<P>(tensors: Vec<crate::LayeredTensor<P>>) -> Vec<P> {
            tensors.into_iter().map(|t| t.into_storage()).collect()
        }
        let floats = transaction.read_floats.into_iter();
        on_this_stream(B::tr_execute(TransactionPrimitive::new(
            floats.map(|tensor| tensor.into_nominal()).collect(),
            storage(transaction.read_qfloats),
            storage(transaction.read_ints),
            storage(transaction.read_bools),
        )))
    }
}
