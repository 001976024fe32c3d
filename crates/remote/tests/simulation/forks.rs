//! Forks of the client while a server is in trouble, and what must be true of the child.

use crate::client::{Client, Flaw, Links};
use crate::world::{MS, World};
use crate::{Story, promises};

/// Forks when the writer is at rest and, unless that is the flaw, between two rounds of the control task.
pub async fn fork(client: &Client, world: &World) -> Result<Box<Client>, String> {
    client.is_resting.set(true);
    while client.is_putting.get() {
        world.sleep(MS).await;
    }
    let child = match client.flaw {
        Flaw::ForksBesideRepairs => client.fork(&mut Links::default()).await.map(Box::new),
        _ => {
            client.wants_child.set(true);
            while client.wants_child.get() {
                world.sleep(MS).await;
            }
            client.child.take()
        }
    };
    client.is_resting.set(false);
    child.ok_or_else(|| "a fork is refused".into())
}

/// Checks that a child has the pages as they were, also when it has made its copies anew, and can change
/// them.
pub async fn goes_on(child: &Client, world: &World, story: Story) -> Result<(), String> {
    let mut links = Links::default();
    let is_at_rest = || {
        let replicator = child.replicator.borrow();
        replicator.replicas_missing() == 0 && replicator.up().len() == child.servers_known()
    };
    for round in 0.. {
        child.control(&mut links).await;
        match round {
            10.. if is_at_rest() => break,
            400.. => return Err("replicas are still missing long after".into()),
            _ => world.sleep(100 * MS).await,
        }
    }
    promises(child, story)?;
    let pages: Vec<(u64, u64)> =
        child.done.borrow().iter().map(|page| (*page.0, *page.1)).collect();
    for (page, version) in pages {
        if !child.get(&mut links, page, version).await {
            return Err(format!("page {page} is lost"));
        }
        let (page, version) = (page, version + 1_000_000);
        if !child.put(&mut links, page, version).await
            || !child.get(&mut links, page, version).await
        {
            return Err(format!("page {page} cannot be changed"));
        }
    }
    child.end(&mut links).await;
    Ok(())
}
