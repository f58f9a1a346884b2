"""/v1/models, /v1/clusters, /v1/workloads and /v1/profiles: documents that requests may name by id."""

# No postponed annotations here: the routes are made in functions, and their parameter types are local names.
from typing import Annotated, Any

from fastapi import APIRouter, Body, Query, Request
from fastapi.responses import JSONResponse, Response

from api.etag import tagged
from api.problem_body import ApiProblem
from api.routes import examples
from api.schemas import DocumentResource, Page, Problem
from api.service import PLURALS, Before, Limit, ServiceDep, cursor, document_resource, page
from api.settings import LOCAL_CLUSTER_ID
from api.store import StoredDocument

NameFilter = Annotated[str | None, Query(max_length=200, description="only documents of this name")]
HashFilter = Annotated[str | None, Query(pattern="^[0-9a-f]{64}$", description="only the document with this content")]
PROBLEMS: dict[int | str, dict[str, Any]] = {
    404: {"model": Problem, "description": "no such resource"},
    422: {"model": Problem, "description": "every broken rule at once"},
}
_WHAT = {
    "model": "a Hugging Face config.json, or an op graph (data: nothing of it is ever executed as code)",
    "cluster": "a cluster: node groups by catalogue preset, or described in full",
    "workload": "a training job: global batch, sequence length, precision, optimizer, limits",
}


def stored(row: StoredDocument, created: bool) -> JSONResponse:
    """201 or 200 with the document's resource, its content left out, and its Location."""
    headers = {"Location": f"/v1/{PLURALS[row.kind]}/{row.id}"}
    return JSONResponse(document_resource(row, whole=False), status_code=201 if created else 200, headers=headers)


def reading_router(kind: str) -> APIRouter:
    """List and read one kind of document."""
    plural = PLURALS[kind]
    router = APIRouter(prefix=f"/v1/{plural}", tags=[plural], responses=PROBLEMS)

    @router.get("", operation_id=f"list_{plural}", summary=f"List {plural}, newest first", response_model=Page)
    def list_all(
        service: ServiceDep, limit: Limit = 50, before: Before = None, name: NameFilter = None, content_hash: HashFilter = None
    ) -> dict[str, Any]:
        rows = service.store.documents(kind, limit=limit, before=cursor(before), name=name, content_hash=content_hash)
        return page([document_resource(row, whole=False) for row in rows], limit)

    @router.get("/{document_id}", operation_id=f"get_{kind}", summary=f"Read one {kind}", response_model=DocumentResource)
    def read(service: ServiceDep, request: Request, document_id: str) -> Response:
        row = service.document(kind, document_id)
        return tagged(request, JSONResponse(document_resource(row, whole=True)))

    @router.delete(
        "/{document_id}", operation_id=f"delete_{kind}", summary=f"Delete one {kind}", status_code=204,
        response_class=Response, responses={409: {"model": Problem, "description": "jobs rest on it, or it is this machine"}},
    )  # fmt: skip
    def delete(service: ServiceDep, document_id: str) -> Response:
        row = service.document(kind, document_id)
        why = "it is this machine" if row.id == LOCAL_CLUSTER_ID else service.store.delete_document(row)
        if why is not None:
            raise ApiProblem(409, "in-use", f"{kind} {document_id} stays: {why}")
        return Response(status_code=204)

    return router


def document_router(kind: str) -> APIRouter:
    """Post, list and read one kind of document."""
    router = reading_router(kind)
    PostedDocument = Annotated[dict[str, Any], Body(openapi_examples=examples.of(kind))]

    @router.post(
        "", operation_id=f"create_{kind}", summary=f"Store a {kind}", response_model=DocumentResource, status_code=201,
        description=f"Stores {_WHAT[kind]}. The same content is the same resource: 201 when it is new, 200 when it was there.",
        responses={200: {"model": DocumentResource, "description": "it was there"}},
    )  # fmt: skip
    def create(service: ServiceDep, document: PostedDocument) -> JSONResponse:
        return stored(*service.reader.store_document(kind, document))

    if kind == "model":

        @router.get("/{document_id}/graph", operation_id="get_model_graph", summary="The captured op graph of a model")
        def graph(service: ServiceDep, document_id: str) -> JSONResponse:
            captured = service.store.graph(service.document("model", document_id).content_hash)
            if captured is None:
                raise ApiProblem(409, "not-captured", "this model was not captured yet; a plan or an estimate does it")
            return JSONResponse(captured)

    return router
